"""Minibatch Metropolis with a noise penalty (penalty_bnn; Ceperley and Dewing 1999), all chains in one batch.

An update draws K new batches, each with the weight N / n of all data, proposes theta', and compares the energies

    d_j = (U_j(theta') - U_j(theta)) / T                       of the same batch j at both ends
    delta = mean_j d_j                                         eq. 16
    chi^2 = f sum_j (d_j - delta)^2 / (K (K - 1))              eq. 17, with the f below
    accepted with probability min(1, q(theta | theta') / q(theta' | theta) exp(-delta - u))              eqs 7, 13

with u = chi^2 / 2 where the variance of delta is known (eq. 7). If it is estimated from K batches, u is the series

    u = x / 2 + x^2 / (4 (K + 1)) + x^3 / (3 (K + 1) (K + 3)) + ...,   x = chi^2          Ceperley and Dewing's

which the paper omits. The series is accurate for x / K <= 1/4. Moves beyond this are counted, and the run warns if they
are more than 5 %. On a Gaussian, with 400 rows per test and proposals of one posterior standard deviation, the variance
of theta is 1.005 times the true one with the series and 1.038 times without it for K = 20, and 1.033 and 1.075 for
K = 10. For K = 2 the series does not help (1.42 and 1.41): take ten batches or more.

Stationary law: exp(-U / T), as far as delta is Gaussian, for any proposal.

Proposals: theta + e p with p ~ N(0, I), or ``num_leapfrog`` steps along the gradient of separate batches. One step is
Langevin, eq. 11 with eta = e^2 / 2: the ratio of densities in eq. 12 is exp(-d|p|^2 / 2). The forward and the reverse
move use the same batches, so each is the inverse of the other. The batches of the proposal are not the batches of the
test: otherwise delta, given the two ends, would not be Gaussian around dU.

The batches of a test are independent, and the rows within a batch are distinct: f = 1. If no row occurs twice in an
update (``replacement=False``), the mean of K batches varies less than 1 / K of one batch: f = 1 - K n / N, and f = 0 if
the update uses all data.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from hf_bayes.core.config import MethodConfig
from hf_bayes.core.requirements import Requirements
from hf_bayes.core.rng import rand, randn
from hf_bayes.core.types import Evaluate, Info, Kernel, Problem, Rngs
from hf_bayes.distributions.approximations import Draws
from hf_bayes.distributions.energy import energy, grad_energy, log_prior
from hf_bayes.methods.mcmc.checks import check_temperature
from hf_bayes.methods.mcmc.hmc import leapfrog

MAX_RATIO = 0.25
"""The largest chi^2 / K at which the series replaces the exact correction (Ceperley and Dewing 1999)."""

MAX_BEYOND = 0.05
"""The largest share of moves beyond ``MAX_RATIO`` without a warning."""


class PenaltyState(NamedTuple):
    """The position, the adapted proposal, and the count of moves beyond the series."""

    theta: Tensor
    """[M, d]"""
    log_step: Tensor
    """[M] log of the proposal's step size."""
    beyond: Tensor
    """[M] int64, number of moves after burn-in with chi^2 / K > 1/4."""
    step: Tensor
    """[M] int64, number of updates done."""


@dataclass(frozen=True, kw_only=True)
class PenaltyConfig(MethodConfig):
    """Minibatch Metropolis. In the trainer K is gradient_accumulation_steps times the processes that share a chain.

    With ``private_rows`` K is gradient_accumulation_steps: batch j consists of the j-th batches of all processes.

    Attributes:
        num_leapfrog: number of leapfrog steps (gradients) of a proposal: 0 is a random walk, 1 is Langevin, and more
            are Hamiltonian.
        proposal_batches: number of batches of an update for the proposal's gradients. The test uses the other batches.
        step_size: standard deviation of the random walk, or leapfrog step e, in parameter units; None takes the run's
            learning_rate. With burn-in it is the start of the adaptation; without burn-in it does not change.
        target_acceptance: target acceptance rate of the adaptation. Lower rates, which suit exact kernels, come with
            energy differences whose variance is too large for the correction. None: no adaptation.
        replacement: True if a row may occur in several batches of an update. False needs K n <= N.
        batch_posterior: the paper's target, whose likelihood has n terms instead of N. This is likelihood tempering at
            T = N / n, and the saved posterior records it as such.
    """

    name: ClassVar[str] = "penalty"
    num_leapfrog: int = 0
    proposal_batches: int = 1
    step_size: float | None = None
    target_acceptance: float | None = 0.7
    replacement: bool = True
    batch_posterior: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_temperature(self.name, self.temperature)
        self._check_count("num_leapfrog", self.num_leapfrog, minimum=0)
        self._check_count("proposal_batches", self.proposal_batches, minimum=1)
        if self.step_size is not None:
            self._check_number("step_size", self.step_size, minimum=0.0, strict=True)
        if self.target_acceptance is not None:
            self._check_number("target_acceptance", self.target_acceptance, minimum=0.0, maximum=1.0, strict=True)
        if self.num_leapfrog and not self.replacement:
            raise ValueError(
                f"{self.name}: num_leapfrog={self.num_leapfrog} needs replacement=True, got False: the test "
                "would miss the rows of the proposal"
            )
        if self.batch_posterior and (self.temperature != 1 or self.temper != "posterior"):
            raise ValueError(
                f"{self.name}: batch_posterior sets temperature and temper itself, got temperature="
                f"{self.temperature:g}, temper={self.temper!r}: leave them out"
            )

    @property
    def requirements(self) -> Requirements:
        return Requirements(
            batch_order="independent" if self.replacement else "disjoint",
            min_batches=2 + self._num_proposing,
            allows_private_rows=True,
            learning_rate="given" if self.step_size is None else "unused",
            follows_schedule=False,
            batch_posterior_setting="batch_posterior" if self.batch_posterior else "",
        )

    @property
    def _num_proposing(self) -> int:
        return self.proposal_batches if self.num_leapfrog else 0

    def build(self, problem: Problem) -> Kernel[PenaltyState]:
        self._check_problem(problem)
        first_step = self.step_size if self.step_size is not None else problem.learning_rate
        adapted_steps = 0 if self.target_acceptance is None else problem.burn_in

        def init(theta: Tensor, evaluate: Evaluate, rngs: Rngs) -> PenaltyState:
            evaluate(theta, gradient=False)  # the caller checks that chains start where it is finite
            count = torch.zeros(len(theta), dtype=torch.int64, device=theta.device)
            return PenaltyState(theta, theta.new_full((len(theta),), first_step).log(), count, count.clone())

        def step(state: PenaltyState, evaluate: Evaluate, rngs: Rngs) -> tuple[PenaltyState, Info]:
            proposal, log_density_ratio = self._propose(state, evaluate, problem, rngs)
            difference = -self._energies(state.theta, evaluate, problem)
            difference = difference + self._energies(proposal, evaluate, problem)
            count = difference.shape[1]
            factor = 1.0 if self.replacement else finite_population_factor(count, problem.batch_fraction)
            variance = factor * variance_of_mean(difference)
            penalty = noise_penalty(variance, count)
            log_ratio = log_density_ratio - difference.mean(1) - penalty
            divergent = ~log_ratio.isfinite()
            acceptance = log_ratio.clamp(max=0).exp().masked_fill(divergent, 0.0).to(state.log_step.dtype)
            accepted = rand(rngs, state.theta) < acceptance
            beyond = variance / count > MAX_RATIO
            new = PenaltyState(
                theta=torch.where(accepted[:, None], proposal, state.theta),
                log_step=self._adapted(state, acceptance, adapted_steps),
                beyond=state.beyond + (beyond & (state.step >= problem.burn_in)),
                step=state.step + 1,
            )
            info = {
                "acceptance": acceptance,
                "penalty": penalty.masked_fill(~penalty.isfinite(), 0.0),
                "beyond_series": beyond.to(acceptance.dtype),
                "finite_population_factor": torch.full_like(acceptance, factor),
                "step_size": state.log_step.exp(),
                "divergent": divergent.to(acceptance.dtype),
            }
            return new, info

        def finish(state: PenaltyState, draws: Tensor) -> Draws:
            moves = (state.step - problem.burn_in).clamp_min(1)
            share = float((state.beyond / moves).mean())
            if share > MAX_BEYOND:
                warnings.warn(
                    f"{self.name}: in {share:.0%} of the moves the variance of the energy difference was above K / 4, "
                    "where its estimate cannot be corrected: the draws are too wide. Take more or larger batches, or a "
                    "smaller step_size",
                    stacklevel=2,
                )
            return Draws.from_chains(draws)

        return Kernel(init, step, finish)

    def _check_problem(self, problem: Problem) -> None:
        if self.batch_posterior:
            raise ValueError(
                f"{self.name}: batch_posterior needs a trainer, where prior and likelihood are separate. Without one, "
                "multiply the batch's log-likelihood in the energy by 1 instead of N / n, and leave it out"
            )
        if not self.replacement and problem.batch_fraction is None:
            raise ValueError(f"{self.name}: replacement=False needs batch_fraction=n / N, got None: pass it to sample")

    def _potential(self, theta: Tensor, evaluate: Evaluate, problem: Problem) -> tuple[Tensor, Tensor]:
        """Return V = U / T [M] of the proposal's batches, and its gradient [M, d]."""
        evaluation, weight = evaluate(theta, batches=slice(0, self._num_proposing)), self.prior_weight
        value = energy(evaluation, theta, problem.prior, prior_weight=weight)
        gradient = grad_energy(evaluation, theta, problem.prior, prior_weight=weight)
        return value / self.temperature, gradient / self.temperature

    def _energies(self, theta: Tensor, evaluate: Evaluate, problem: Problem) -> Tensor:
        """Return U / T of each of the test's batches, [M, K]."""
        columns = evaluate(theta, gradient=False, batches=slice(self._num_proposing, None)).batch_log_lik
        if columns is None or columns.shape[1] < 2:
            raise ValueError(
                f"{self.name} needs at least {self.requirements.min_batches} batches per update to estimate their "
                f"variance, got {'none' if columns is None else columns.shape[1] + self._num_proposing}"
            )
        prior = self.prior_weight * log_prior(problem.prior, theta, columns).to(columns.dtype)
        return -(columns + prior[:, None]) / self.temperature

    def _propose(self, state: PenaltyState, evaluate: Evaluate, problem: Problem, rngs: Rngs) -> tuple[Tensor, Tensor]:
        """Return theta' [M, d], and log q(theta | theta') - log q(theta' | theta) [M]."""
        momentum, size = randn(rngs, state.theta), state.log_step.exp()[:, None]
        if not self.num_leapfrog:
            return state.theta + size * momentum, torch.zeros_like(state.log_step)

        def potential(theta: Tensor) -> tuple[Tensor, Tensor]:
            return self._potential(theta, evaluate, problem)

        _, gradient = potential(state.theta)
        proposal, end, _, _ = leapfrog(state.theta, momentum, gradient, size, self.num_leapfrog, potential)
        return proposal, -0.5 * ((end - momentum) * (end + momentum)).sum(1)

    def _adapted(self, state: PenaltyState, acceptance: Tensor, adapted_steps: int) -> Tensor:
        """Return the log step of the next update, [M], by Robbins-Monro as in ``metropolis``; burn-in freezes it."""
        if self.target_acceptance is None:
            return state.log_step
        gain = 2.0 * (state.step + 1).to(state.log_step.dtype) ** -0.75
        return torch.where(
            state.step < adapted_steps, state.log_step + gain * (acceptance - self.target_acceptance), state.log_step
        )


def variance_of_mean(difference: Tensor) -> Tensor:
    """Return the estimated variance [M] of the mean of K independent differences [M, K] (eq. 17)."""
    return difference.var(1) / difference.shape[1]


def noise_penalty(variance: Tensor, num_batches: int) -> Tensor:
    """Return u [M], three terms of Ceperley and Dewing's series for a variance estimated from K batches."""
    k = num_batches
    return variance / 2 + variance.square() / (4 * (k + 1)) + variance**3 / (3 * (k + 1) * (k + 3))


def finite_population_factor(num_batches: int, batch_fraction: float | None) -> float:
    """Return f = 1 - K n / N, the factor of the variance if no row occurs twice in K batches of n rows."""
    assert batch_fraction is not None
    return max(0.0, 1 - num_batches * batch_fraction)
