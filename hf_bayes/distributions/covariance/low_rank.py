"""A low-rank covariance: a diagonal covariance, changed along a few directions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import mode
from typing import ClassVar

import torch
from torch import Tensor

from hf_bayes.core.layout import Layout
from hf_bayes.distributions.covariance.base import (
    Covariance,
    check_orthonormal,
    check_shapes,
    faults,
    gram,
    require_density,
)


@dataclass(frozen=True, eq=False)
class LowRank(Covariance):
    """A diagonal covariance that is stretched or shrunk along r directions: S (I + Q diag(c - 1) Q') S, S = diag(std).

    Attributes:
        std: [d], positive, or 0 for points: the standard deviations without the r directions.
        basis: [d, r] Q, with orthonormal columns.
        scale: [r] c > 0: the variance along each column in units of S^2. Added precision gives a scale below 1.
    """

    kind: ClassVar[str] = "low_rank"
    std: Tensor
    basis: Tensor
    scale: Tensor

    @classmethod
    def plus(cls, std: Tensor, columns: Tensor, weight: float = 1.0) -> LowRank:
        """Build diag(std^2) + weight C C' from ``columns`` C [d, r]."""
        basis, singular = _left_singular_vectors(columns, std)
        return cls(std, basis, 1 + (weight**0.5 * singular).square())

    @classmethod
    def less(cls, precision: Tensor, columns: Tensor) -> LowRank:
        """Build (diag(precision) + U U')^-1 from ``columns`` U [d, r].

        Raises:
            ValueError: if a diagonal precision is not positive.
        """
        if not bool((precision > 0).all()):
            raise ValueError(f"a low-rank covariance needs positive precisions, got {faults(precision)}")
        scale = precision.sqrt()
        basis, singular = _left_singular_vectors(columns, scale)
        return cls(1 / scale, basis, 1 / (1 + singular.square()))

    def truncated(self, rank: int) -> LowRank:
        """Return a covariance with only the ``rank`` directions whose precision exceeds S^-2 by the largest factor.

        The other directions are replaced by the diagonal of their precision, so the diagonal of the whole precision
        does not change.

        Raises:
            ValueError: if the variance along some direction is larger than S^2, because it has no added precision.
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
        if self.std.ndim != 1 or not bool((self.std >= 0).all()):
            raise ValueError(
                f"a low-rank covariance needs positive stds of shape [d], or 0 for points, got {faults(self.std)}"
            )
        if self.basis.shape != (len(self.std), len(self.scale)) or not bool((self.scale > 0).all()):
            raise ValueError(
                f"a low-rank covariance needs a basis [d, r] and r positive scales, got {list(self.basis.shape)} and "
                f"{faults(self.scale)}"
            )

    @property
    def dim(self) -> int:
        return len(self.std)

    def _stretch(self, vectors: Tensor, factor: Tensor) -> Tensor:
        """Return (I + Q diag(factor - 1) Q') v."""
        return vectors + ((vectors @ self.basis) * (factor - 1)) @ self.basis.mT

    def root(self, noise: Tensor) -> Tensor:
        return self.std * self._stretch(noise, self.scale.sqrt())

    def product(self, vectors: Tensor) -> Tensor:
        return self.std * self._stretch(self.std * vectors, self.scale)

    def precision_product(self, vectors: Tensor) -> Tensor:
        require_density(self.std)
        return self._stretch(vectors / self.std, 1 / self.scale) / self.std

    @property
    def variance(self) -> Tensor:
        squares = self.basis.square()  # 1 - the squares of a row may be 0, and rounding makes it negative
        return self.std.square() * ((1 - squares.sum(1)).clamp_min(0) + squares @ self.scale)

    @property
    def precision_diagonal(self) -> Tensor:
        require_density(self.std)
        return (1 + self.basis.square() @ (1 / self.scale - 1)) / self.std.square()

    @property
    def log_det(self) -> Tensor:
        require_density(self.std)
        return 2 * self.std.log().sum() + self.scale.log().sum()

    def tensors(self, layout: Layout) -> dict[str, Tensor]:
        found = {f"stds.{name}": value for name, value in layout.unflatten(self.std).items()}
        found |= {f"basis.{name}": value for name, value in layout.unflatten(self.basis.mT).items()}
        return found | {"scale": self.scale}

    @classmethod
    def shapes(cls, tensors: Mapping[str, Tensor], layout: Layout) -> dict[str, tuple[int, ...]]:
        shapes = layout.named_shapes
        ranks = {f"basis.{name}": -1 - len(shape) for name, shape in shapes.items()} | {"scale": -1}
        found_ranks = [
            tensors[key].shape[at] for key, at in ranks.items() if key in tensors and tensors[key].ndim >= -at
        ]
        rank = mode(found_ranks) if found_ranks else 0  # a tensor with another rank than most tensors is wrong
        found: dict[str, tuple[int, ...]] = {f"stds.{name}": shape for name, shape in shapes.items()}
        return found | {f"basis.{name}": (rank, *shape) for name, shape in shapes.items()} | {"scale": (rank,)}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], layout: Layout) -> LowRank:
        check_shapes(tensors, cls.shapes(tensors, layout))
        std, basis = (layout.flatten({n: tensors[f"{kind}.{n}"] for n in layout.names}) for kind in ("stds", "basis"))
        check_orthonormal("basis", basis.mT)
        return cls(std, basis.mT, tensors["scale"])


def _left_singular_vectors(columns: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
    """Return the left singular vectors [d, min(d, r)] and the singular values of diag(1 / std) C.

    A run of many parameters ends here, so as few copies of C as possible are alive together: the singular values are
    those of the triangular factor [r, r] of a QR decomposition. In float32, the basis of a QR (or singular value)
    decomposition of ten million rows is orthonormal to 2e-3 only. Its Gram matrix L L' corrects it: Q L^-T is
    orthonormal, and Q R = (Q L^-T) (L' R).

    Args:
        columns: [d, r] C.
        std: [d]; the row of a point, which has std 0, counts as zeros.
    """
    relative = columns / std[:, None]
    relative.masked_fill_(~(std > 0)[:, None], 0.0)
    basis, triangle = torch.linalg.qr(relative)
    del relative
    upper = torch.linalg.cholesky(gram(basis)).mT  # L'
    vectors, singular, _ = torch.linalg.svd(upper @ triangle.double(), full_matrices=False)
    corrected = torch.linalg.solve_triangular(upper, vectors, upper=True)
    return basis @ corrected.to(basis), singular.to(basis)
