"""A diagonal covariance: independent coordinates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

from torch import Tensor

from hf_bayes.core.layout import Layout
from hf_bayes.distributions.covariance.base import Covariance, check_shapes, faults, require_density


@dataclass(frozen=True, eq=False)
class Diagonal(Covariance):
    """The covariance diag(std^2).

    Attributes:
        std: [d], positive, or 0 for points.
    """

    kind: ClassVar[str] = "diagonal"
    std: Tensor

    def __post_init__(self) -> None:
        if self.std.ndim != 1 or not bool((self.std >= 0).all()):
            raise ValueError(
                f"a diagonal Gaussian needs positive stds of shape [d], or 0 for points, got {faults(self.std)}"
            )

    @property
    def dim(self) -> int:
        return len(self.std)

    def root(self, noise: Tensor) -> Tensor:
        return self.std * noise

    def product(self, vectors: Tensor) -> Tensor:
        return self.std.square() * vectors

    def precision_product(self, vectors: Tensor) -> Tensor:
        require_density(self.std)
        return vectors / self.std.square()

    @property
    def variance(self) -> Tensor:
        return self.std.square()

    @property
    def precision_diagonal(self) -> Tensor:
        require_density(self.std)
        return self.std.square().reciprocal()

    @property
    def log_det(self) -> Tensor:
        require_density(self.std)
        return 2 * self.std.log().sum()

    def tensors(self, layout: Layout) -> dict[str, Tensor]:
        return {f"stds.{name}": value for name, value in layout.unflatten(self.std).items()}

    @classmethod
    def shapes(cls, tensors: Mapping[str, Tensor], layout: Layout) -> dict[str, tuple[int, ...]]:
        return {f"stds.{name}": shape for name, shape in layout.named_shapes.items()}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], layout: Layout) -> Self:
        check_shapes(tensors, cls.shapes(tensors, layout))
        return cls(layout.flatten({name: tensors[f"stds.{name}"] for name in layout.names}))
