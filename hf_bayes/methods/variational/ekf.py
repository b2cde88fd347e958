"""The extended Kalman filter for streams: one pass over the data, with a posterior after every update.

Duffield et al. 2024 (posteriors); Ollivier 2018, who shows that the filter is a natural gradient. For
q = N(mean, P), the prior at the start, and g = grad log p(rows of the update | mean) in nats, not scaled to all data:

    P^-1 = P^-1 + (l / T) F,      F = g g', or its diagonal
    mean = mean + (l / T) P g

An update counts its rows as one observation, so F is the empirical Fisher information if an update has one row. At
l = T = 1 a pass over the data multiplies the prior by every likelihood term once: Bayes' rule, in the filter's
approximation. A second pass would count each row twice, and is refused.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from hf_bayes.core.config import MethodConfig
from hf_bayes.core.requirements import Requirements
from hf_bayes.core.types import UNNAMED, Evaluation, Info, Prior, Problem, Rngs, Rule, locate_at_theta
from hf_bayes.distributions.approximations import Gaussian, instead_of
from hf_bayes.distributions.covariance import Full
from hf_bayes.distributions.energy import GaussianPrior

MOST_PARAMETERS = 4096
"""The largest d of a full covariance. An update solves a system of this size."""


class EKFState(NamedTuple):
    """q after the rows so far.

    Attributes:
        theta: [M, d] its mean.
        precision: [M, d], or [M, d, d]: P^-1.
        step: [M] int64, number of updates done.
    """

    theta: Tensor
    precision: Tensor
    step: Tensor


@dataclass(frozen=True, kw_only=True)
class EKFConfig(MethodConfig):
    """The extended Kalman filter. A chain ends in one Gaussian; ``draws_per_chain`` is not used.

    q starts at the weights of the model, with the covariance of the prior; ``prior_mean`` is not used. The learning
    rate multiplies every observation; without one it is 1.

    Attributes:
        structure: "diagonal", or "full" for few random parameters.
        init_std: standard deviation of q at the start; None takes the prior's.
    """

    name: ClassVar[str] = "ekf"
    num_chains: int = 1
    init_jitter: float = 0.0
    structure: Literal["diagonal", "full"] = "diagonal"
    init_std: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.temperature == 0:
            raise ValueError(
                f"{self.name}: temperature must be > 0, got {self.temperature}: at T = 0 an observation fixes the "
                'mean. Use method="map"'
            )
        self._check_choice("structure", self.structure, ("diagonal", "full"))
        if self.init_std is not None:
            self._check_number("init_std", self.init_std, minimum=0.0, strict=True)

    @property
    def requirements(self) -> Requirements:
        return Requirements(learning_rate="unused", draws_are_chain_states=False)

    def build(self, problem: Problem) -> Rule[EKFState]:
        share = self._share(problem)
        self._check_size(sum(problem.sizes))
        start = self._start(problem)

        def init(theta: Tensor, rngs: Rngs) -> EKFState:
            step = torch.zeros(len(theta), dtype=torch.int64, device=theta.device)
            return EKFState(theta, start.to(theta).expand(len(theta), *start.shape).clone(), step)

        def update(state: EKFState, evaluation: Evaluation, lr: float, rngs: Rngs) -> tuple[EKFState, Info]:
            assert evaluation.grad_log_lik is not None
            gradient, weight = share * evaluation.grad_log_lik, lr / self.temperature
            if self.structure == "diagonal":
                precision = state.precision + weight * gradient.square()
                theta = state.theta + weight * gradient / precision
            else:
                precision = state.precision + weight * gradient[:, :, None] * gradient[:, None, :]
                factor = torch.linalg.cholesky(precision)
                theta = state.theta + weight * torch.cholesky_solve(gradient[:, :, None], factor).squeeze(-1)
            return EKFState(theta, precision, state.step + 1), {"log_lik": share * evaluation.log_lik}

        def finish(state: EKFState, draws: Tensor) -> Gaussian:
            if self.structure == "diagonal":
                return Gaussian.diagonal(state.theta, state.precision.rsqrt())
            return Gaussian(state.theta, tuple(map(Full, torch.linalg.cholesky(state.precision))))

        return Rule(init, locate_at_theta, update, finish)

    def _share(self, problem: Problem) -> float:
        """Return the share of the data that an update counts, and refuse runs of more than one pass.

        If updates do not divide the data, the last one of a pass repeats rows. Then each update counts a little less
        than its rows, so that together they count the data once.
        """
        share = problem.update_fraction
        if share is None and UNNAMED in problem.shapes:
            if problem.batch_fraction is None:
                return 1.0  # an energy of the rows of its batch alone
            share = problem.batch_fraction
        if share is None:
            raise ValueError(
                f"{self.name}: the number of rows in the training data must be known, got an iterable data set: use "
                "one with a length (it is read once), or Run.update with an energy of each batch"
            )
        once = math.ceil(1 / share - 1e-6)
        if problem.num_steps > once:
            raise ValueError(
                f"{self.name}: a run must be one pass over the data, {once} updates, got {problem.num_steps}: a second "
                "pass, shuffled or not, counts every row twice, and the posterior becomes too narrow. Set "
                f"num_train_epochs=1 (or max_steps={once})"
            )
        return min(share, 1 / problem.num_steps)

    def _check_size(self, dim: int) -> None:
        if self.structure == "full" and dim > MOST_PARAMETERS:
            raise ValueError(
                f"{self.name}: structure='full' needs at most {MOST_PARAMETERS} random parameters, got {dim}: use "
                "structure='diagonal', or a smaller subspace"
            )

    def _start(self, problem: Problem) -> Tensor:
        """Return P^-1 before the first row, [d] or [d, d]."""
        dim = sum(problem.sizes)
        if self.init_std is not None:
            diagonal = torch.full((dim,), self.init_std**-2, dtype=torch.float64)
            return diagonal if self.structure == "diagonal" else torch.diag(diagonal)
        weight = self.prior_weight / self.temperature
        return weight * self._precision_of(problem.prior, dim)

    def _precision_of(self, prior: Prior, dim: int) -> Tensor:
        """Return the precision of a Gaussian prior, [d] or [d, d]."""
        if isinstance(prior, GaussianPrior):
            diagonal = prior.std.square().reciprocal().expand(dim)
            return diagonal if self.structure == "diagonal" else torch.diag(diagonal)
        if isinstance(prior, Gaussian) and len(prior.covariances) == 1:
            (covariance,) = prior.covariances
            if self.structure == "diagonal":
                return covariance.precision_diagonal
            return covariance.precision_product(torch.eye(dim, dtype=prior.means.dtype, device=prior.means.device))
        raise ValueError(f"{self.name}: the filter starts from one Gaussian, {instead_of(prior)}, or set init_std")
