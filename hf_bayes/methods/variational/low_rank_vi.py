"""Low-rank Gaussian variational inference (Ong, Nott and Smith 2018): q has a covariance of low rank plus diagonal.

    q = N(mean, D (I + W' W) D),   D = diag(exp(log scale)),   W [r, d]

F(q) = E_q[U] - T H[q] is minimised by an optimiser on reparametrised draws, see ``factored``. At rank r = d the optimum
is the optimum of ``full_rank_vi``; at any rank, F is at most the minimum of ``mean_field``. The mean, the diagonal of
the covariance and the columns of W D are averaged over the second half of the run. So variances are averages of
variances, without the bias that averages of standard deviations would have.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hf_bayes.core.rng import randn
from hf_bayes.core.types import Problem, Rngs, Rule
from hf_bayes.distributions.covariance import LowRank
from hf_bayes.methods.variational.factored import FactoredState, Structure, factored_rule
from hf_bayes.methods.variational.gaussian_vi import ReparametrisedVIConfig
from hf_bayes.methods.variational.points import random_elements

START = 0.1
"""The size of W at the start: at W = 0 its gradient is 0, whatever the posterior."""


@dataclass(frozen=True, kw_only=True)
class LowRankVIConfig(ReparametrisedVIConfig):
    """Gaussian variational inference with a low-rank plus diagonal covariance.

    Attributes:
        rank: r, the number of directions beside the diagonal; at most d. The state holds about 4 r tensors of the size
            of theta.
    """

    name: ClassVar[str] = "low_rank_vi"
    rank: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_count("rank", self.rank, minimum=1)

    def build(self, problem: Problem) -> Rule[FactoredState]:
        dim = sum(problem.sizes)
        if self.rank > dim:
            raise ValueError(
                f"{self.name}: rank must be at most the number of random parameters, {dim}, got {self.rank}: lower it, "
                'or use method="full_rank_vi"'
            )
        is_random = random_elements(self.name, self.points, problem.shapes)
        return factored_rule(self, _LowRank(self.rank, is_random), problem)


class _LowRank(Structure):
    """A = I + W' W, by the r x r matrix I + W W'. Points have no eps, and no columns of W."""

    def __init__(self, rank: int, is_random: Tensor | None = None) -> None:
        self._rank, self.is_random = rank, is_random

    def factors(self, theta: Tensor, rngs: Rngs) -> Tensor:
        like = theta.new_empty(len(theta), self._rank, theta.shape[1])
        return self.free((START / math.sqrt(theta.shape[1])) * randn(rngs, like))

    def noise(self, theta: Tensor, rngs: Rngs) -> Tensor:
        found = randn(rngs, theta.new_empty(len(theta), theta.shape[1] + self._rank))
        return torch.cat([self.free(found[:, : theta.shape[1]]), found[:, theta.shape[1] :]], 1)

    def split(self, noise: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        return noise[..., :dim], noise[..., dim:]

    def solve(self, factors: Tensor, kappa: Tensor) -> Tensor:
        inner: Tensor = torch.linalg.solve(_capacitance(factors), factors @ kappa.mT)
        inside: Tensor = factors.mT @ inner
        return kappa - inside.mT

    def entropy_gradient(self, factors: Tensor) -> Tensor:
        found: Tensor = torch.linalg.solve(_capacitance(factors), factors)  # W (I + W' W)^-1 = (I + W W')^-1 W
        return found

    def free(self, gradient: Tensor) -> Tensor:
        return gradient if self.is_random is None else gradient * self.is_random.to(gradient)

    def half_log_det(self, factors: Tensor) -> Tensor:
        found: Tensor = 0.5 * torch.logdet(_capacitance(factors))
        return found

    def moments(self, scale: Tensor, factors: Tensor) -> Tensor:
        columns = scale[:, None] * factors
        return torch.cat([self.free(scale.square() + columns.square().sum(1))[:, None], columns], 1)

    def covariance(self, moments: Tensor) -> LowRank:
        # an average of squares is never below the square of the average, so what is left is positive
        return LowRank.plus((moments[0] - moments[1:].square().sum(0)).sqrt(), moments[1:].mT)


def _capacitance(factors: Tensor) -> Tensor:
    """Return I + W W', [M, r, r]."""
    identity = torch.eye(factors.shape[1], dtype=factors.dtype, device=factors.device)
    return identity + factors @ factors.mT
