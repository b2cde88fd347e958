"""What every covariance can be asked, and what all of them share."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from hf_bayes.core.layout import Layout


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


def check_orthonormal(name: str, basis: Tensor) -> None:
    """Refuse a basis [n, r] whose columns are not orthonormal.

    Raises:
        ValueError: saying by how much.
    """
    identity = torch.eye(basis.shape[-1], dtype=basis.dtype, device=basis.device)
    error = float((basis.mT @ basis - identity).abs().max()) if len(basis) else 0.0
    if not error < 1e-3:  # float32 eigenvectors are orthonormal to about 1e-6
        raise ValueError(f"{name} has no orthonormal columns (off by {error:.1g}): it is no eigenbasis")


def faults(values: Tensor) -> str:
    """Of numbers that must be positive, in words: their shape, and how many are not."""
    bad = int((~(values > 0)).sum())
    return f"shape {list(values.shape)}, {bad} of {values.numel()} not positive"
