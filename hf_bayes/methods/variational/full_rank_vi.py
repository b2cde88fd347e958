"""Full-rank Gaussian variational inference (Titsias and Lazaro-Gredilla 2014; Kucukelbir et al. 2017).

    q = N(mean, L L'),   L = D (I + W'),   D = diag(exp(log scale)),   W [d, d] strictly upper triangular

F(q) = E_q[U] - T H[q] is minimised by an optimiser on reparametrised draws, see ``factored``. Optimum: for a Gaussian
posterior with covariance S at T = 1, its mean and T S. The mean and the covariance are averaged over the second half of
the run. For small subspaces only: the state holds about four matrices [d, d] for each chain.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hf_bayes.core.rng import randn
from hf_bayes.core.types import Problem, Rngs, Rule
from hf_bayes.distributions.covariance import Full
from hf_bayes.methods.variational.factored import FactoredState, Structure, factored_rule
from hf_bayes.methods.variational.gaussian_vi import ReparametrisedVIConfig

MOST_PARAMETERS = 4096
"""The largest d: the state of a chain is then 270 MB in float32."""


@dataclass(frozen=True, kw_only=True)
class FullRankVIConfig(ReparametrisedVIConfig):
    """Gaussian variational inference with a full covariance, for few random parameters."""

    name: ClassVar[str] = "full_rank_vi"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.points is not None:
            raise ValueError(
                f"{self.name}: points={self.points!r} is for mean_field, blob and low_rank_vi, as a full covariance "
                "has no zero variances: leave it out, or use one of these"
            )

    def build(self, problem: Problem) -> Rule[FactoredState]:
        dim = sum(problem.sizes)
        if dim > MOST_PARAMETERS:
            raise ValueError(
                f"{self.name}: a full covariance needs at most {MOST_PARAMETERS} random parameters, got {dim}: use "
                'method="low_rank_vi", or a smaller subspace'
            )
        return factored_rule(self, _FullRank(), problem)


class _FullRank(Structure):
    """A = (I + W') (I + W)."""

    def factors(self, theta: Tensor, rngs: Rngs) -> Tensor:
        return theta.new_zeros(len(theta), theta.shape[1], theta.shape[1])

    def noise(self, theta: Tensor, rngs: Rngs) -> Tensor:
        return randn(rngs, theta)

    def split(self, noise: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        return noise, noise

    def solve(self, factors: Tensor, kappa: Tensor) -> Tensor:
        options = {"unitriangular": True}
        half = torch.linalg.solve_triangular(factors.mT, kappa.mT, upper=False, **options)
        found: Tensor = torch.linalg.solve_triangular(factors, half, upper=True, **options)
        return found.mT

    def entropy_gradient(self, factors: Tensor) -> float:
        return 0.0  # det A = 1

    def free(self, gradient: Tensor) -> Tensor:
        return gradient.triu(1)

    def half_log_det(self, factors: Tensor) -> Tensor:
        return torch.zeros_like(factors[:, 0, 0])

    def moments(self, scale: Tensor, factors: Tensor) -> Tensor:
        identity = torch.eye(factors.shape[1], dtype=factors.dtype, device=factors.device)
        root = scale[:, :, None] * (identity + factors.mT)
        return root @ root.mT

    def largest_step(self, dim: int) -> float:
        # (I + W)^-1 grows like (1 + step)^d if all signs agree, as after the first update: this keeps it below e^0.5.
        return 0.5 / dim

    def covariance(self, moments: Tensor) -> Full:
        precision = torch.cholesky_inverse(torch.linalg.cholesky(moments))
        return Full(torch.linalg.cholesky(precision))
