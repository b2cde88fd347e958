"""A Kronecker-factored covariance: one block per matrix, with eigenvalues in a Kronecker eigenbasis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from hf_bayes.core.layout import Layout
from hf_bayes.distributions.covariance.base import Covariance, check_orthonormal, check_shapes, faults
from hf_bayes.distributions.covariance.diagonal import Diagonal


@dataclass(frozen=True, eq=False)
class KroneckerBlock:
    """The covariance of one matrix [m, n], flattened row by row: (left (x) right) diag(variances) (left (x) right)'.

    Attributes:
        left: [m, m] with orthonormal columns; None is the identity.
        right: [n, n] with orthonormal columns; None is the identity.
        variances: [m, n] the eigenvalues, positive.
    """

    left: Tensor | None
    right: Tensor | None
    variances: Tensor

    def __post_init__(self) -> None:
        shape = self.variances.shape
        if len(shape) != 2 or not bool((self.variances > 0).all()):
            raise ValueError(f"a Kronecker block needs positive variances [m, n], got {faults(self.variances)}")
        for name, basis, side in (("left", self.left, shape[0]), ("right", self.right, shape[1])):
            if basis is not None and basis.shape != (side, side):
                raise ValueError(f"{name} must be {[side, side]}, got {list(basis.shape)}")

    def rotate(self, matrices: Tensor) -> Tensor:
        """Return left' V right: matrices V [..., m, n] in the coordinates of the eigenbasis."""
        matrices = matrices if self.left is None else self.left.mT @ matrices
        return matrices if self.right is None else matrices @ self.right

    def rotate_back(self, matrices: Tensor) -> Tensor:
        """Return left V right', the inverse of ``rotate``."""
        matrices = matrices if self.left is None else self.left @ matrices
        return matrices if self.right is None else matrices @ self.right.mT


def marginal(left: Tensor | None, right: Tensor | None, values: Tensor) -> Tensor:
    """Return the diagonal of (left (x) right) diag(values) (left (x) right)', [m, n]."""
    values = values if left is None else left.square() @ values
    return values if right is None else values @ right.square().mT


@dataclass(frozen=True, eq=False)
class Kronecker(Covariance):
    """A block-diagonal covariance with one block per random tensor.

    Attributes:
        blocks: in the order of theta; a ``KroneckerBlock``, or the stds [n] of a diagonal block.
    """

    kind: ClassVar[str] = "kronecker"
    blocks: tuple[KroneckerBlock | Tensor, ...]

    @cached_property
    def sizes(self) -> list[int]:
        return [len(b) if isinstance(b, Tensor) else b.variances.numel() for b in self.blocks]

    @property
    def dim(self) -> int:
        return sum(self.sizes)

    def root(self, noise: Tensor) -> Tensor:
        return self._map(noise, lambda variance, v: variance.sqrt() * v, back_only=True)

    def product(self, vectors: Tensor) -> Tensor:
        return self._map(vectors, lambda variance, v: variance * v)

    def precision_product(self, vectors: Tensor) -> Tensor:
        return self._map(vectors, lambda variance, v: v / variance)

    @property
    def variance(self) -> Tensor:
        return torch.cat(
            [
                b.square() if isinstance(b, Tensor) else marginal(b.left, b.right, b.variances).flatten()
                for b in self.blocks
            ]
        )

    @property
    def precision_diagonal(self) -> Tensor:
        return torch.cat(
            [
                b.square().reciprocal()
                if isinstance(b, Tensor)
                else marginal(b.left, b.right, b.variances.reciprocal()).flatten()
                for b in self.blocks
            ]
        )

    @property
    def log_det(self) -> Tensor:
        return torch.stack(
            [2 * b.log().sum() if isinstance(b, Tensor) else b.variances.log().sum() for b in self.blocks]
        ).sum()

    def _map(self, vectors: Tensor, scale: object, *, back_only: bool = False) -> Tensor:
        """Apply ``scale(variances, coordinates)`` in the eigenbasis of each block."""
        assert callable(scale)
        pieces = []
        for block, piece in zip(self.blocks, torch.split(vectors, self.sizes, -1), strict=True):
            if isinstance(block, Tensor):
                pieces.append(scale(block.square(), piece))
                continue
            matrices = torch.unflatten(piece, -1, block.variances.shape)
            matrices = matrices if back_only else block.rotate(matrices)
            pieces.append(block.rotate_back(scale(block.variances, matrices)).flatten(-2))
        return torch.cat(pieces, -1)

    def tensors(self, layout: Layout) -> dict[str, Tensor]:
        found = {}
        for name, shape, block in zip(layout.names, layout.shapes, self.blocks, strict=True):
            if isinstance(block, Tensor):
                found[f"stds.{name}"] = block.view(shape)
                continue
            found[f"variances.{name}"] = block.variances
            for side, basis in (("left", block.left), ("right", block.right)):
                # the identity is stored as an empty tensor, so that a missing tensor is always an error
                found[f"{side}.{name}"] = block.variances.new_zeros(0) if basis is None else basis
        return found

    @classmethod
    def shapes(cls, tensors: Mapping[str, Tensor], layout: Layout) -> dict[str, tuple[int, ...]]:
        found: dict[str, tuple[int, ...]] = {}
        for name, shape in layout.named_shapes.items():
            key = f"stds.{name}" if f"stds.{name}" in tensors else f"variances.{name}"
            if key not in tensors:
                raise ValueError(f"missing tensors {[key]} (or stds.{name})")
            found[key] = shape
            if key.startswith("stds."):
                continue
            bases = [f"{side}.{name}" for side in ("left", "right")]
            if missing := [basis for basis in bases if basis not in tensors]:
                raise ValueError(f"missing tensors {missing}: the eigenbasis of {key}")
            if len(shape) != 2:
                raise ValueError(
                    f"{key}: {name} is no matrix {list(shape)}, and has no eigenbasis: expected stds.{name}"
                )
            for basis, side in zip(bases, shape, strict=True):
                found[basis] = (side, side) if tensors[basis].numel() else (0,)
        return found

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], layout: Layout) -> Kronecker:
        check_shapes(tensors, cls.shapes(tensors, layout))
        blocks: list[KroneckerBlock | Tensor] = []
        for name in layout.names:
            if f"stds.{name}" in tensors:
                blocks.append(Diagonal(tensors[f"stds.{name}"].flatten()).std)
                continue
            bases = [f"{side}.{name}" for side in ("left", "right")]
            left, right = (tensors[basis] if tensors[basis].numel() else None for basis in bases)
            blocks.append(KroneckerBlock(left, right, tensors[f"variances.{name}"]))
            for basis in bases:
                if tensors[basis].numel():
                    check_orthonormal(basis, tensors[basis])
        return cls(tuple(blocks))
