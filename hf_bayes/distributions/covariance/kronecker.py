"""A Kronecker-factored covariance: one block per matrix, with eigenvalues in a Kronecker eigenbasis."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from hf_bayes.core.layout import Layout
from hf_bayes.distributions.covariance.base import Covariance, check_orthonormal, check_shapes, faults
from hf_bayes.distributions.covariance.diagonal import Diagonal


@dataclass(frozen=True, eq=False)
class KroneckerBlock(Covariance):
    """The covariance of one matrix [m, n], flattened row by row: (left (x) right) diag(variances) (left (x) right)'.

    A vector [m] is a matrix of one column.

    Attributes:
        left: [m, m] with orthonormal columns; None is the identity.
        right: [n, n] with orthonormal columns; None is the identity.
        variances: [m, n] the eigenvalues, positive.
    """

    kind: ClassVar[str] = "kronecker_block"
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

    @property
    def dim(self) -> int:
        return self.variances.numel()

    @property
    def eigenvalues(self) -> Tensor:
        """The variances [m, n] in the coordinates of the eigenbasis."""
        return self.variances

    def root(self, noise: Tensor) -> Tensor:
        # symmetric, so that draws do not depend on the choice of eigenvectors: their signs are arbitrary, and so is a
        # basis of equal variances. On another device, or with another number of processes, rounding makes other ones
        return self._rotated_back(self.variances.sqrt() * self._rotated(noise))

    def product(self, vectors: Tensor) -> Tensor:
        return self._rotated_back(self.variances * self._rotated(vectors))

    def precision_product(self, vectors: Tensor) -> Tensor:
        return self._rotated_back(self._rotated(vectors) / self.variances)

    @property
    def variance(self) -> Tensor:
        return marginal(self.left, self.right, self.variances).flatten()

    @property
    def precision_diagonal(self) -> Tensor:
        return marginal(self.left, self.right, self.variances.reciprocal()).flatten()

    @property
    def log_det(self) -> Tensor:
        return self.variances.log().sum()

    def tensors(self, layout: Layout) -> dict[str, Tensor]:
        (name,) = layout.names
        # the identity is stored as an empty tensor, so that a missing tensor is always an error
        left, right = (self.variances.new_zeros(0) if basis is None else basis for basis in (self.left, self.right))
        return {
            f"variances.{name}": self.variances.view(layout.shapes[0]),
            f"left.{name}": left,
            f"right.{name}": right,
        }

    @classmethod
    def shapes(cls, tensors: Mapping[str, Tensor], layout: Layout) -> dict[str, tuple[int, ...]]:
        (name,), (shape,) = layout.names, layout.shapes
        key, bases = f"variances.{name}", [f"{side}.{name}" for side in ("left", "right")]
        if key not in tensors:
            raise ValueError(f"missing tensors {[key]} (or stds.{name})")
        if missing := [basis for basis in bases if basis not in tensors]:
            raise ValueError(f"missing tensors {missing}: the eigenbasis of {key}")
        if len(shape) not in (1, 2):
            raise ValueError(f"{key}: {name} is no matrix {list(shape)}, and has no eigenbasis: expected stds.{name}")
        sides = zip(bases, (*shape, 1)[:2], strict=True)
        return {key: shape} | {basis: (side, side) if tensors[basis].numel() else (0,) for basis, side in sides}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], layout: Layout) -> KroneckerBlock:
        check_shapes(tensors, cls.shapes(tensors, layout))
        (name,) = layout.names
        bases = {f"{side}.{name}": tensors[f"{side}.{name}"] for side in ("left", "right")}
        left, right = (basis if basis.numel() else None for basis in bases.values())
        variances = tensors[f"variances.{name}"]
        found = cls(left, right, variances.view(len(variances), -1))
        for key, basis in bases.items():
            if basis.numel():
                check_orthonormal(key, basis)
        return found

    def _matrices(self, vectors: Tensor) -> Tensor:
        return torch.unflatten(vectors, -1, self.variances.shape)

    def _rotated(self, vectors: Tensor) -> Tensor:
        """Return left' V right of vectors V [..., m n]: matrices [..., m, n] in the coordinates of the eigenbasis."""
        matrices = self._matrices(vectors)
        matrices = matrices if self.left is None else self.left.mT @ matrices
        return matrices if self.right is None else matrices @ self.right

    def _rotated_back(self, matrices: Tensor) -> Tensor:
        """Return left V right' as vectors [..., m n], the inverse of ``_rotated``."""
        matrices = matrices if self.left is None else self.left @ matrices
        return (matrices if self.right is None else matrices @ self.right.mT).flatten(-2)


@dataclass(frozen=True, eq=False)
class DiagonalBlock(Diagonal):
    """The covariance of a tensor with independent elements. Its eigenbasis is the identity."""

    kind: ClassVar[str] = "diagonal_block"
    left: ClassVar[None] = None
    right: ClassVar[None] = None

    @property
    def eigenvalues(self) -> Tensor:
        """The variances [n]."""
        return self.variance


def marginal(left: Tensor | None, right: Tensor | None, values: Tensor) -> Tensor:
    """Return the diagonal of (left (x) right) diag(values) (left (x) right)', [m, n]."""
    values = values if left is None else left.square() @ values
    return values if right is None else values @ right.square().mT


@dataclass(frozen=True, eq=False)
class Kronecker(Covariance):
    """A block-diagonal covariance with one block per random tensor.

    Attributes:
        blocks: in the order of theta.
    """

    kind: ClassVar[str] = "kronecker"
    blocks: tuple[KroneckerBlock | DiagonalBlock, ...]

    @cached_property
    def sizes(self) -> list[int]:
        return [block.dim for block in self.blocks]

    @property
    def dim(self) -> int:
        return sum(self.sizes)

    def root(self, noise: Tensor) -> Tensor:
        return torch.cat([block.root(piece) for block, piece in self._pieces(noise)], -1)

    def product(self, vectors: Tensor) -> Tensor:
        return torch.cat([block.product(piece) for block, piece in self._pieces(vectors)], -1)

    def precision_product(self, vectors: Tensor) -> Tensor:
        return torch.cat([block.precision_product(piece) for block, piece in self._pieces(vectors)], -1)

    @property
    def variance(self) -> Tensor:
        return torch.cat([block.variance for block in self.blocks])

    @property
    def precision_diagonal(self) -> Tensor:
        return torch.cat([block.precision_diagonal for block in self.blocks])

    @property
    def log_det(self) -> Tensor:
        return torch.stack([block.log_det for block in self.blocks]).sum()

    def _pieces(self, vectors: Tensor) -> Iterator[tuple[KroneckerBlock | DiagonalBlock, Tensor]]:
        return zip(self.blocks, torch.split(vectors, self.sizes, -1), strict=True)

    def tensors(self, layout: Layout) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name, shape, block in zip(layout.names, layout.shapes, self.blocks, strict=True):
            found |= block.tensors(Layout((name,), (shape,)))
        return found

    @classmethod
    def shapes(cls, tensors: Mapping[str, Tensor], layout: Layout) -> dict[str, tuple[int, ...]]:
        found: dict[str, tuple[int, ...]] = {}
        for kind, part in _parts(tensors, layout):
            found |= kind.shapes(tensors, part)
        return found

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], layout: Layout) -> Kronecker:
        check_shapes(tensors, cls.shapes(tensors, layout))
        blocks: list[KroneckerBlock | DiagonalBlock] = []
        for kind, part in _parts(tensors, layout):
            blocks.append(kind.from_tensors({name: tensors[name] for name in kind.shapes(tensors, part)}, part))
        return cls(tuple(blocks))


def _parts(
    tensors: Mapping[str, Tensor], layout: Layout
) -> Iterator[tuple[type[KroneckerBlock | DiagonalBlock], Layout]]:
    """Yield the kind of block that ``tensors`` hold for each random tensor, and a layout of this random tensor."""
    for name, shape in layout.named_shapes.items():
        yield DiagonalBlock if f"stds.{name}" in tensors else KroneckerBlock, Layout((name,), (shape,))
