"""The curvature as a low-rank matrix U U'."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from hf_bayes.distributions.covariance import Covariance, LowRank
from hf_bayes.methods.laplace.curvature import Curvature, require_positive


@dataclass(frozen=True, eq=False)
class LowRankCurvature(Curvature):
    """A curvature of low rank, U U'."""

    kind: ClassVar[str] = "low_rank"
    columns: Tensor
    """[d, r] U"""

    @property
    def dim(self) -> int:
        return len(self.columns)

    def scaled(self, factor: float) -> LowRankCurvature:
        return LowRankCurvature(factor**0.5 * self.columns)

    def dense(self) -> Tensor:
        return self.columns @ self.columns.mT

    @property
    def diagonal(self) -> Tensor:
        return self.columns.square().sum(1)

    def log_det(self, precision: Tensor) -> Tensor:
        precision = precision.expand(self.dim)
        inner = self.columns.mT @ (self.columns / precision[:, None])  # matrix determinant lemma
        return precision.log().sum() + torch.logdet(inner + torch.eye(len(inner), dtype=inner.dtype).to(inner.device))

    def plus(self, prior: Covariance) -> tuple[Curvature, Tensor]:
        """Return the exact sum for a low-rank prior that is nowhere wider than its diagonal part; the ranks add up."""
        if not isinstance(prior, LowRank) or bool((prior.scale > 1).any()):
            return super().plus(prior)
        before = prior.basis * (1 / prior.scale - 1).sqrt() / prior.std[:, None]
        return LowRankCurvature(torch.cat([self.columns, before], 1)), prior.std.square().reciprocal()

    def covariance(self, precision: Tensor, *, temperature: float = 1.0) -> LowRank:
        found = LowRank.less(require_positive(precision.expand(self.dim)), self.columns)
        return replace(found, std=temperature**0.5 * found.std)

    def draws(self, precision: Tensor, noise: Tensor, *, temperature: float = 1.0) -> Tensor:
        """Return S (I + B B')^-1/2 noise with S = tau^-1/2 and B = S U.

        This is ``LowRank.root`` without the eigenvectors of B B'.
        """
        std = precision.expand(self.dim).rsqrt()
        columns = std[:, None] * self.columns
        shrinkage: Callable[[Tensor], Tensor] = _Shrinkage.apply
        inner = shrinkage(columns.mT @ columns)
        drawn: Tensor = temperature**0.5 * std * (noise + (noise @ columns) @ inner @ columns.mT)
        return drawn


class _Shrinkage(torch.autograd.Function):
    """The function g(A) of a symmetric A [r, r], where g(x) = ((1 + x)^-1/2 - 1) / x.

    With it, (I + B B')^-1/2 = I + B g(B'B) B'. In s = (1 + x)^1/2, g is -1 / (s (s + 1)), and its divided differences
    have no cancellation. So the gradient (Daleckii and Krein 1965) is finite for equal eigenvalues, where the gradient
    of an eigenvector is 0 / 0.
    """

    @staticmethod
    def forward(ctx: Any, matrix: Tensor) -> Tensor:
        values, basis = torch.linalg.eigh(matrix)
        root = (1 + values.clamp_min(0)).sqrt()
        ctx.save_for_backward(root, basis)
        value: Tensor = -(basis / (root * (root + 1))) @ basis.mT
        return value

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Tensor:
        root, basis = ctx.saved_tensors
        one, other = root[:, None], root[None]
        ratios = (one + other + 1) / ((one + other) * one * other * (one + 1) * (other + 1))
        upstream = 0.5 * (upstream + upstream.mT)
        gradient: Tensor = basis @ (ratios * (basis.mT @ upstream @ basis)) @ basis.mT
        return gradient
