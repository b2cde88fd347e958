"""The interface of a covariance structure, and the functions that all structures share."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from hf_bayes.core.layout import Layout

_GRAM_ROWS = 1 << 12
"""The number of rows of a matrix that are made float64 together."""


class Covariance(ABC):
    """A symmetric positive definite matrix Sigma [d, d].

    Some structures allow points, which are elements with variance 0. Draws and variances then exist. The precision and
    the density do not, and their methods raise a ValueError.
    """

    kind: ClassVar[str]

    @property
    @abstractmethod
    def dim(self) -> int:
        """The dimension d."""

    @abstractmethod
    def root(self, noise: Tensor) -> Tensor:
        """Return L noise with L L' = Sigma, [..., d] -> [..., d]. Standard normal noise gives draws of N(0, Sigma)."""

    @abstractmethod
    def product(self, vectors: Tensor) -> Tensor:
        """Return Sigma v, [..., d] -> [..., d]."""

    @abstractmethod
    def precision_product(self, vectors: Tensor) -> Tensor:
        """Return Sigma^-1 v, [..., d] -> [..., d]."""

    @property
    @abstractmethod
    def variance(self) -> Tensor:
        """The diagonal of Sigma, [d]."""

    @property
    @abstractmethod
    def precision_diagonal(self) -> Tensor:
        """The diagonal of Sigma^-1, [d]."""

    @property
    @abstractmethod
    def log_det(self) -> Tensor:
        """The scalar log det Sigma."""

    @abstractmethod
    def tensors(self, layout: Layout) -> dict[str, Tensor]:
        """Return the tensors to store in a file; their names end in the names of the parameters."""

    @classmethod
    @abstractmethod
    def shapes(cls, tensors: Mapping[str, Tensor], layout: Layout) -> dict[str, tuple[int, ...]]:
        """Return the names and shapes that ``from_tensors`` expects.

        What differs between files, such as the rank or an identity basis, is read from ``tensors``.

        Args:
            tensors: the tensors of one covariance, or of several with a leading dimension.
            layout: the layout of theta.
        Raises:
            ValueError: if a tensor is missing from which this is read.
        """

    @classmethod
    @abstractmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], layout: Layout) -> Self:
        """Build a covariance from the tensors of a file; the inverse of ``tensors``.

        Raises:
            ValueError: for missing or unknown names, wrong shapes, or values that do not form a covariance.
        """


def dense(covariance: Covariance, like: Tensor) -> Tensor:
    """Return Sigma as a [d, d] tensor in the dtype and on the device of ``like``; for small d."""
    return covariance.product(torch.eye(covariance.dim, dtype=like.dtype, device=like.device))


def log_normal(covariance: Covariance, difference: Tensor) -> Tensor:
    """Return the normalised log N(difference; 0, Sigma), [..., d] -> [...]."""
    distance = (difference * covariance.precision_product(difference)).sum(-1)
    return -0.5 * (distance + covariance.log_det + covariance.dim * math.log(2 * math.pi))


def moved(value: Any, to: torch.device | str | Tensor) -> Any:
    """Return ``value`` with all its tensors on a device, or in the dtype and on the device of a tensor.

    ``value`` is a covariance, a curvature, a Gaussian, or a part of one of them.
    """
    match value:
        case Tensor():
            return value.to(to)
        case tuple():
            return tuple(moved(item, to) for item in value)
    if not is_dataclass(value) or isinstance(value, type):
        return value
    return replace(value, **{field.name: moved(getattr(value, field.name), to) for field in fields(value)})


def check_shapes(
    tensors: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]], lead: tuple[int, ...] = ()
) -> None:
    """Raise an error unless ``tensors`` have exactly the expected names, and the shapes [*lead, *shape]."""
    missing, extra = sorted(set(expected) - set(tensors)), sorted(set(tensors) - set(expected))
    if missing or extra:
        raise ValueError(f"missing tensors {missing}, unknown tensors {extra}")
    for name, shape in expected.items():
        if tuple(tensors[name].shape) != (*lead, *shape):
            raise ValueError(f"{name}: expected shape {[*lead, *shape]}, got {list(tensors[name].shape)}")


def gram(columns: Tensor) -> Tensor:
    """Return C' C [r, r] of C [n, r] in float64, for a block of rows at a time: sums of millions of terms round."""
    total = columns.new_zeros(columns.shape[1], columns.shape[1], dtype=torch.float64)
    for rows in columns.split(_GRAM_ROWS):
        exact = rows.double()
        total += exact.mT @ exact
    return total


def check_orthonormal(name: str, basis: Tensor) -> None:
    """Check that the columns of a basis [n, r] are orthonormal.

    Raises:
        ValueError: with the largest error.
    """
    found = gram(basis)
    error = float((found - torch.eye(len(found)).to(found)).abs().max()) if len(basis) else 0.0
    if not error < 1e-3:  # float32 eigenvectors are orthonormal to about 1e-6
        raise ValueError(f"{name} has no orthonormal columns (off by {error:.1g}): it is no eigenbasis")


def require_density(std: Tensor) -> None:
    """Raise if there are points: a covariance with zero variances has no inverse, and no density.

    Args:
        std: [d] standard deviations.
    """
    if num_points := int((std == 0).sum()):
        raise ValueError(
            f"{num_points} of {len(std)} elements of this Gaussian are points, with a standard deviation of 0: it has "
            "no density and cannot be a prior. Take a posterior in which every parameter is random"
        )


def faults(values: Tensor) -> str:
    """Describe values that must be positive: their shape, and how many of them are not positive."""
    bad = int((~(values > 0)).sum())
    return f"shape {list(values.shape)}, {bad} of {values.numel()} not positive"
