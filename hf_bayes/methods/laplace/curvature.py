"""H, the curvature of -log p(D | theta) on the full data, and the posterior's covariance from it.

The posterior's precision is H + tau. tau is the precision of the prior, elementwise or of another Gaussian
(``Curvature.plus``). T is as in docs/scale.md: a tempered posterior has the covariance T (H + tau)^-1, and a tempered
likelihood gives (H / T + tau)^-1.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from hf_bayes.distributions.covariance import Covariance, Diagonal, Full


class NotPositiveDefinite(ValueError):
    """The error of an H + tau with eigenvalues that are not positive: no Gaussian and no evidence exist.

    Attributes:
        coordinate: the element of theta with the lowest eigenvalue, where H is diagonal; else None.
    """

    coordinate: int | None = None


class Curvature(ABC):
    """H [d, d], symmetric. In all methods ``precision`` is tau, [d] or a scalar tensor.

    Attributes:
        hessian: True for a Hessian, which may have negative eigenvalues; "energy" for one of a user's energy, which has
            other remedies. Other curvatures are sums of squares.
    """

    kind: ClassVar[str]
    hessian: bool | str = False

    @property
    @abstractmethod
    def dim(self) -> int:
        """d, the number of random parameters."""

    @abstractmethod
    def scaled(self, factor: float) -> Self:
        """Return factor * H."""

    @abstractmethod
    def dense(self) -> Tensor:
        """Return H as a matrix [d, d], for small d."""

    @property
    @abstractmethod
    def diagonal(self) -> Tensor:
        """The diagonal of H, [d]."""

    @abstractmethod
    def log_det(self, precision: Tensor) -> Tensor:
        """Return log det(H + tau), differentiable in tau; NaN or infinite if H + tau is not positive definite."""

    @abstractmethod
    def covariance(self, precision: Tensor, *, temperature: float = 1.0) -> Covariance:
        """Return temperature * (H + tau)^-1.

        Raises:
            NotPositiveDefinite: if H + tau is not positive definite.
        """

    def draws(self, precision: Tensor, noise: Tensor, *, temperature: float = 1.0) -> Tensor:
        """Return ``covariance(precision).root(noise)`` [M, d] for standard normals [M, d], differentiable in tau."""
        return self.covariance(precision, temperature=temperature).root(noise)

    def plus(self, prior: Covariance) -> tuple[Curvature, Tensor]:
        """Return (H', tau [d]), whose sum is H + Sigma^-1 as far as this structure can represent Sigma^-1.

        The default, for structures that cannot, adds the diagonal of Sigma^-1.
        """
        return self, prior.precision_diagonal


@dataclass(frozen=True, eq=False)
class DiagonalCurvature(Curvature):
    """A diagonal curvature, diag(values)."""

    kind: ClassVar[str] = "diagonal"
    values: Tensor
    """[d]"""
    hessian: bool | str = False

    @property
    def dim(self) -> int:
        return len(self.values)

    def scaled(self, factor: float) -> Self:
        return replace(self, values=factor * self.values)

    def dense(self) -> Tensor:
        return torch.diag(self.values)

    @property
    def diagonal(self) -> Tensor:
        return self.values

    def log_det(self, precision: Tensor) -> Tensor:
        return (self.values + precision).log().sum()

    def covariance(self, precision: Tensor, *, temperature: float = 1.0) -> Diagonal:
        variances = temperature / require_positive(self.values + precision, hessian=self.hessian)
        return Diagonal(variances.sqrt())


@dataclass(frozen=True, eq=False)
class FullCurvature(Curvature):
    """A dense curvature."""

    kind: ClassVar[str] = "full"
    matrix: Tensor
    """[d, d]"""
    hessian: bool | str = False

    @property
    def dim(self) -> int:
        return len(self.matrix)

    def scaled(self, factor: float) -> FullCurvature:
        return replace(self, matrix=factor * self.matrix)

    def dense(self) -> Tensor:
        return self.matrix

    @property
    def diagonal(self) -> Tensor:
        return self.matrix.diagonal()

    def plus(self, prior: Covariance) -> tuple[Curvature, Tensor]:
        """Return the exact sum, for every prior."""
        eye = torch.eye(prior.dim, dtype=self.matrix.dtype, device=self.matrix.device)
        both = replace(self, matrix=self.matrix + prior.precision_product(eye))
        return both, self.matrix.new_zeros(prior.dim)

    def _posterior(self, precision: Tensor) -> Tensor:
        return self.matrix + torch.diag(precision.expand(self.dim))

    def log_det(self, precision: Tensor) -> Tensor:
        factor, info = torch.linalg.cholesky_ex(self._posterior(precision))
        return torch.where(info == 0, 2 * factor.diagonal().log().sum(), torch.nan)

    def covariance(self, precision: Tensor, *, temperature: float = 1.0) -> Full:
        precisions = self._posterior(precision)
        factor, info = torch.linalg.cholesky_ex(precisions)
        if int(info) or not bool(factor.isfinite().all()):
            finite = bool(precisions.isfinite().all())
            ends = torch.linalg.eigvalsh(precisions)[[0, -1]].tolist() if finite else [math.nan] * 2
            detail = "its lowest eigenvalue is {:.3g}, its largest {:.3g}".format(*ends)
            raise NotPositiveDefinite(_not_positive(detail, hessian=self.hessian))
        return Full(factor / temperature**0.5)


def require_positive(values: Tensor, *, hessian: bool | str = False) -> Tensor:
    """Return the eigenvalues of H + tau.

    Raises:
        NotPositiveDefinite: if one of them is not positive or not finite.
    """
    bad = ~((values > 0) & values.isfinite())
    if bool(bad.any()):
        lowest, place = values.nan_to_num(nan=-float("inf")).flatten().min(0)
        which = f" (number {int(place)})" if values.numel() > 1 else ""
        detail = f"{int(bad.sum())} of {values.numel()} eigenvalues are not, lowest {float(lowest):.3g}{which}"
        error = NotPositiveDefinite(_not_positive(detail, hessian=hessian))
        error.coordinate = int(place)
        raise error
    return values


def _not_positive(detail: str, *, hessian: bool | str) -> str:
    return (
        f"the posterior's precision H + tau is not positive definite ({detail}): there is no Gaussian here. "
        + not_positive(hessian=hessian)
    )


def not_positive(*, hessian: bool | str) -> str:
    """Return the reason for which H + tau may not be positive definite, and the remedy, for an error message."""
    if hessian == "energy":
        return (
            "A Hessian is indefinite away from a minimum, and zero along directions that the energy does not "
            "determine: run more updates, start elsewhere, or add a proper prior"
        )
    if hessian:
        return (
            "A Hessian is indefinite away from a minimum: train on, use estimator='ggn', whose curvature is never "
            "negative, or lower prior_std, the jitter of this model: 1 / prior_std^2 is added to every eigenvalue"
        )
    return (
        "This curvature is a sum of squares. The data do not determine some directions, and there the rounding error "
        "of its largest eigenvalue exceeds the prior's 1 / prior_std^2: lower prior_std, the jitter of this model, or "
        "give the model in float64"
    )
