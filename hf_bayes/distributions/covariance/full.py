"""A full covariance, held as a triangular factor of the precision; for few parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from hf_bayes.core.layout import Layout
from hf_bayes.distributions.covariance.base import Covariance, check_shapes, faults


@dataclass(frozen=True, eq=False)
class Full(Covariance):
    """A dense covariance, represented by the Cholesky factor of its precision.

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
                f"got {faults(factor.diagonal()) if square else list(factor.shape)}"
            )

    @property
    def dim(self) -> int:
        return len(self.precision_cholesky)

    def root(self, noise: Tensor) -> Tensor:
        return self._solve(self.precision_cholesky, noise, upper=False)

    def product(self, vectors: Tensor) -> Tensor:
        return self.root(self._solve(self.precision_cholesky.mT, vectors, upper=True))

    def precision_product(self, vectors: Tensor) -> Tensor:
        return (vectors @ self.precision_cholesky) @ self.precision_cholesky.mT

    def _solve(self, factor: Tensor, vectors: Tensor, *, upper: bool) -> Tensor:
        """Return X [..., d] with X factor = vectors.

        All leading dimensions are flattened into one: for vectors [B, C, d] the solver would copy the factor B times.
        """
        flat: Tensor = torch.linalg.solve_triangular(factor, vectors.reshape(-1, self.dim), upper=upper, left=False)
        return flat.reshape(vectors.shape)

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
