"""Covariances of a Gaussian over theta that are never formed: diagonal, Kronecker, low rank plus diagonal, full.

Each answers the same six questions about Sigma [d, d]: a root for sampling, products with Sigma and with its inverse,
the diagonals of both, and log det Sigma. ``tensors`` and ``from_tensors`` are its form on disk.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from statistics import mode
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from hf_bayes.subspace import Layout


class Covariance(ABC):
    """Sigma [d, d], symmetric and positive definite."""

    kind: ClassVar[str]

    @property
    @abstractmethod
    def dim(self) -> int:
        """d"""

    @abstractmethod
    def root(self, noise: Tensor) -> Tensor:
        """[..., d] -> [..., d]: L noise with L L' = Sigma. Of standard normals it makes draws around zero."""

    @abstractmethod
    def product(self, vectors: Tensor) -> Tensor:
        """[..., d] -> [..., d]: Sigma v."""

    @abstractmethod
    def precision_product(self, vectors: Tensor) -> Tensor:
        """[..., d] -> [..., d]: Sigma^-1 v."""

    @property
    @abstractmethod
    def variance(self) -> Tensor:
        """[d]: the diagonal of Sigma."""

    @property
    @abstractmethod
    def precision_diagonal(self) -> Tensor:
        """[d]: the diagonal of Sigma^-1."""

    @property
    @abstractmethod
    def log_det(self) -> Tensor:
        """log det Sigma, a scalar."""

    @abstractmethod
    def tensors(self, layout: Layout) -> dict[str, Tensor]:
        """What a file holds of it; names end in those of the parameters."""

    @classmethod
    @abstractmethod
    def shapes(cls, tensors: Mapping[str, Tensor], layout: Layout) -> dict[str, tuple[int, ...]]:
        """What ``from_tensors`` expects: name -> shape. What the file may choose (a rank, an identity) is as it chose.

        Args:
            tensors: of one covariance, or of several with a dimension in front.
        Raises:
            ValueError: for missing names that decide it.
        """

    @classmethod
    @abstractmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], layout: Layout) -> Self:
        """The inverse of ``tensors``.

        Raises:
            ValueError: for missing or unknown names, wrong shapes, or numbers that are no covariance's.
        """


@dataclass(frozen=True, eq=False)
class Diagonal(Covariance):
    """diag(std^2).

    Attributes:
        std: [d], positive.
    """

    kind: ClassVar[str] = "diagonal"
    std: Tensor

    def __post_init__(self) -> None:
        if self.std.ndim != 1 or not bool((self.std > 0).all()):
            raise ValueError(f"a diagonal Gaussian needs positive stds of shape [d], got {_faults(self.std)}")

    @property
    def dim(self) -> int:
        return len(self.std)

    def root(self, noise: Tensor) -> Tensor:
        return self.std * noise

    def product(self, vectors: Tensor) -> Tensor:
        return self.std.square() * vectors

    def precision_product(self, vectors: Tensor) -> Tensor:
        return vectors / self.std.square()

    @property
    def variance(self) -> Tensor:
        return self.std.square()

    @property
    def precision_diagonal(self) -> Tensor:
        return self.std.square().reciprocal()

    @property
    def log_det(self) -> Tensor:
        return 2 * self.std.log().sum()

    def tensors(self, layout: Layout) -> dict[str, Tensor]:
        return {f"stds.{name}": value for name, value in layout.unflatten(self.std).items()}

    @classmethod
    def shapes(cls, tensors: Mapping[str, Tensor], layout: Layout) -> dict[str, tuple[int, ...]]:
        return {f"stds.{name}": shape for name, shape in layout.named_shapes.items()}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], layout: Layout) -> Diagonal:
        check_shapes(tensors, cls.shapes(tensors, layout))
        return cls(layout.flatten({name: tensors[f"stds.{name}"] for name in layout.names}))


@dataclass(frozen=True, eq=False)
class KroneckerBlock:
    """The covariance of one matrix [m, n], row by row: (left (x) right) diag(variances) (left (x) right)'.

    Attributes:
        left: [m, m] orthonormal columns; None is the identity.
        right: [n, n] likewise.
        variances: [m, n] the eigenvalues, positive.
    """

    left: Tensor | None
    right: Tensor | None
    variances: Tensor

    def __post_init__(self) -> None:
        shape = self.variances.shape
        if len(shape) != 2 or not bool((self.variances > 0).all()):
            raise ValueError(f"a Kronecker block needs positive variances [m, n], got {_faults(self.variances)}")
        for name, basis, side in (("left", self.left, shape[0]), ("right", self.right, shape[1])):
            if basis is not None and basis.shape != (side, side):
                raise ValueError(f"{name} must be {[side, side]}, got {list(basis.shape)}")

    def rotate(self, matrices: Tensor) -> Tensor:
        """[..., m, n] into the eigenbasis: left' V right."""
        matrices = matrices if self.left is None else self.left.mT @ matrices
        return matrices if self.right is None else matrices @ self.right

    def rotate_back(self, matrices: Tensor) -> Tensor:
        """[..., m, n] out of the eigenbasis: left V right'."""
        matrices = matrices if self.left is None else self.left @ matrices
        return matrices if self.right is None else matrices @ self.right.mT


def marginal(left: Tensor | None, right: Tensor | None, values: Tensor) -> Tensor:
    """[m, n]: the diagonal of (left (x) right) diag(values) (left (x) right)'."""
    values = values if left is None else left.square() @ values
    return values if right is None else values @ right.square().mT


@dataclass(frozen=True, eq=False)
class Kronecker(Covariance):
    """One block for each random tensor: Kronecker, or diagonal (its stds) where a tensor has none.

    Attributes:
        blocks: in the order of theta.
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
        for block, piece in zip(self.blocks, vectors.split(self.sizes, -1), strict=True):
            if isinstance(block, Tensor):
                pieces.append(scale(block.square(), piece))
                continue
            matrices = piece.unflatten(-1, block.variances.shape)
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
                # the identity is an empty tensor: a basis that is not there was lost
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
                    _check_orthonormal(basis, tensors[basis])
        return cls(tuple(blocks))


@dataclass(frozen=True, eq=False)
class LowRank(Covariance):
    """A diagonal one stretched or shrunk along r directions: S (I + Q diag(c - 1) Q') S, S = diag(std).

    Attributes:
        std: [d], positive: what the covariance is in all other directions.
        basis: [d, r] Q, orthonormal columns.
        scale: [r] c > 0: the variance along each column in units of S^2. A precision gained is a scale below 1.
    """

    kind: ClassVar[str] = "low_rank"
    std: Tensor
    basis: Tensor
    scale: Tensor

    @classmethod
    def plus(cls, std: Tensor, columns: Tensor) -> LowRank:
        """diag(std^2) + C C' of ``columns`` C [d, r]."""
        basis, singular, _ = torch.linalg.svd(columns / std[:, None], full_matrices=False)
        return cls(std, basis, 1 + singular.square())

    @classmethod
    def less(cls, precision: Tensor, columns: Tensor) -> LowRank:
        """(diag(precision) + U U')^-1 of ``columns`` U [d, r]."""
        scale = precision.sqrt()
        basis, singular, _ = torch.linalg.svd(columns / scale[:, None], full_matrices=False)
        return cls(1 / scale, basis, 1 / (1 + singular.square()))

    def truncated(self, rank: int) -> LowRank:
        """The ``rank`` directions whose precision exceeds S^-2 by the largest factor; of the others the diagonal.

        The diagonal of the whole precision stays as it was.

        Raises:
            ValueError: if some direction is wider than S^2: there is no precision in it to keep.
        """
        gain = 1 / self.scale - 1
        if bool((gain < 0).any()):
            raise ValueError(
                f"{int((gain < 0).sum())} of {len(gain)} directions are wider than the diagonal part: only directions "
                "of more precision can be truncated"
            )
        if len(gain) <= rank:
            return self
        columns = self.basis * gain.sqrt() / self.std[:, None]
        order = gain.argsort(descending=True)
        kept, others = columns[:, order[:rank]], columns[:, order[rank:]]
        return LowRank.less(self.std.square().reciprocal() + others.square().sum(1), kept)

    def __post_init__(self) -> None:
        if self.std.ndim != 1 or not bool((self.std > 0).all()):
            raise ValueError(f"a low-rank covariance needs positive stds of shape [d], got {_faults(self.std)}")
        if self.basis.shape != (len(self.std), len(self.scale)) or not bool((self.scale > 0).all()):
            raise ValueError(
                f"a low-rank covariance needs a basis [d, r] and r positive scales, got {list(self.basis.shape)} and "
                f"{_faults(self.scale)}"
            )

    @property
    def dim(self) -> int:
        return len(self.std)

    def _stretch(self, vectors: Tensor, factor: Tensor) -> Tensor:
        """(I + Q diag(factor - 1) Q') v"""
        return vectors + ((vectors @ self.basis) * (factor - 1)) @ self.basis.mT

    def root(self, noise: Tensor) -> Tensor:
        return self.std * self._stretch(noise, self.scale.sqrt())

    def product(self, vectors: Tensor) -> Tensor:
        return self.std * self._stretch(self.std * vectors, self.scale)

    def precision_product(self, vectors: Tensor) -> Tensor:
        return self._stretch(vectors / self.std, 1 / self.scale) / self.std

    @property
    def variance(self) -> Tensor:
        return self.std.square() * (1 + self.basis.square() @ (self.scale - 1))

    @property
    def precision_diagonal(self) -> Tensor:
        return (1 + self.basis.square() @ (1 / self.scale - 1)) / self.std.square()

    @property
    def log_det(self) -> Tensor:
        return 2 * self.std.log().sum() + self.scale.log().sum()

    def tensors(self, layout: Layout) -> dict[str, Tensor]:
        found = {f"stds.{name}": value for name, value in layout.unflatten(self.std).items()}
        found |= {f"basis.{name}": value for name, value in layout.unflatten(self.basis.mT).items()}
        return found | {"scale": self.scale}

    @classmethod
    def shapes(cls, tensors: Mapping[str, Tensor], layout: Layout) -> dict[str, tuple[int, ...]]:
        shapes = layout.named_shapes
        ranks = {f"basis.{name}": -1 - len(shape) for name, shape in shapes.items()} | {"scale": -1}
        said = [tensors[key].shape[at] for key, at in ranks.items() if key in tensors and tensors[key].ndim >= -at]
        rank = mode(said) if said else 0  # the odd one out is wrong
        found: dict[str, tuple[int, ...]] = {f"stds.{name}": shape for name, shape in shapes.items()}
        return found | {f"basis.{name}": (rank, *shape) for name, shape in shapes.items()} | {"scale": (rank,)}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], layout: Layout) -> LowRank:
        check_shapes(tensors, cls.shapes(tensors, layout))
        std, basis = (layout.flatten({n: tensors[f"{kind}.{n}"] for n in layout.names}) for kind in ("stds", "basis"))
        _check_orthonormal("basis", basis.mT)
        return cls(std, basis.mT, tensors["scale"])


@dataclass(frozen=True, eq=False)
class Full(Covariance):
    """A dense covariance, by its precision.

    Attributes:
        precision_cholesky: [d, d] lower triangular C with C C' = Sigma^-1, its diagonal positive.
    """

    kind: ClassVar[str] = "full"
    precision_cholesky: Tensor

    def __post_init__(self) -> None:
        factor = self.precision_cholesky
        square = factor.ndim == 2 and factor.shape[0] == factor.shape[1]
        if not square or not bool((factor.diagonal() > 0).all()) or bool(factor.triu(1).any()):
            raise ValueError(
                "a full covariance needs a lower triangular [d, d] factor of its precision with a positive diagonal, "
                f"got {_faults(factor.diagonal()) if square else list(factor.shape)}"
            )

    @property
    def dim(self) -> int:
        return len(self.precision_cholesky)

    def root(self, noise: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(self.precision_cholesky, noise, upper=False, left=False)

    def product(self, vectors: Tensor) -> Tensor:
        return self.root(torch.linalg.solve_triangular(self.precision_cholesky.mT, vectors, upper=True, left=False))

    def precision_product(self, vectors: Tensor) -> Tensor:
        return (vectors @ self.precision_cholesky) @ self.precision_cholesky.mT

    @cached_property
    def variance(self) -> Tensor:
        return torch.cholesky_inverse(self.precision_cholesky).diagonal()

    @property
    def precision_diagonal(self) -> Tensor:
        return self.precision_cholesky.square().sum(1)

    @property
    def log_det(self) -> Tensor:
        return -2 * self.precision_cholesky.diagonal().log().sum()

    def tensors(self, layout: Layout) -> dict[str, Tensor]:
        return {"precision_cholesky": self.precision_cholesky}

    @classmethod
    def shapes(cls, tensors: Mapping[str, Tensor], layout: Layout) -> dict[str, tuple[int, ...]]:
        return {"precision_cholesky": (layout.dim, layout.dim)}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], layout: Layout) -> Full:
        check_shapes(tensors, cls.shapes(tensors, layout))
        return cls(tensors["precision_cholesky"])


COVARIANCES: dict[str, type[Covariance]] = {kind.kind: kind for kind in (Diagonal, Kronecker, LowRank, Full)}
"""By the name that a posterior's file uses."""


def dense(covariance: Covariance, like: Tensor) -> Tensor:
    """[d, d]: Sigma itself, in the dtype and on the device of ``like``; for small d."""
    return covariance.product(torch.eye(covariance.dim, dtype=like.dtype, device=like.device))


def log_normal(covariance: Covariance, difference: Tensor) -> Tensor:
    """[..., d] -> [...]: log N(difference; 0, Sigma), normalised."""
    distance = (difference * covariance.precision_product(difference)).sum(-1)
    return -0.5 * (distance + covariance.log_det + covariance.dim * math.log(2 * math.pi))


def moved(value: Any, to: torch.device | str | Tensor) -> Any:
    """A covariance or a curvature, a Gaussian, or a part of one, with its tensors on a device, or like a tensor."""
    if isinstance(value, Tensor):
        return value.to(to)
    if isinstance(value, tuple):
        return tuple(moved(item, to) for item in value)
    if not is_dataclass(value) or isinstance(value, type):
        return value
    return replace(value, **{field.name: moved(getattr(value, field.name), to) for field in fields(value)})


def check_shapes(
    tensors: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]], lead: tuple[int, ...] = ()
) -> None:
    """Refuse what is not [*lead, *shape] of the expected ones, by its own name."""
    missing, extra = sorted(set(expected) - set(tensors)), sorted(set(tensors) - set(expected))
    if missing or extra:
        raise ValueError(f"missing tensors {missing}, unknown tensors {extra}")
    for name, shape in expected.items():
        if tuple(tensors[name].shape) != (*lead, *shape):
            raise ValueError(f"{name}: expected shape {[*lead, *shape]}, got {list(tensors[name].shape)}")


def _check_orthonormal(name: str, basis: Tensor) -> None:
    error = float((basis.mT @ basis - torch.eye(basis.shape[-1], dtype=basis.dtype)).abs().max()) if len(basis) else 0.0
    if not error < 1e-3:  # float32 eigenvectors are orthonormal to about 1e-6
        raise ValueError(f"{name} has no orthonormal columns (off by {error:.1g}): it is no eigenbasis")


def _faults(values: Tensor) -> str:
    bad = int((~(values > 0)).sum())
    return f"shape {list(values.shape)}, {bad} of {values.numel()} not positive"
