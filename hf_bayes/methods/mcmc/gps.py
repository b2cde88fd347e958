"""Exact GPS: Metropolis-Hastings with the proposal of ``samplers/agps.py`` (agps, app. C), all chains in one batch.

With s = -grad U / T and a reference mu that is the same for both ends of a move, elementwise

    sigma^2(theta) = |theta - mu| / |s(theta)|                      eqs 3 and 7
    m(theta) = theta + sigma^2(theta) s(theta)
    theta' ~ q(. | theta) = N(m(theta), min(sigma(theta), lambda)^2)
    accepted with probability min(1, exp(-dU / T) q(theta | theta') / q(theta' | theta))

Stationary law: exp(-U / T) exactly. The paper's Algorithm 2 is no valid kernel: it carries mu_t from move to move, so
that the way back is proposed from another mu than its q(theta | theta') says; the weights of modes come out wrong. Here
the first half of burn-in is a-GPS itself, which accepts every finite proposal; its mean (with ``family`` gamma or beta,
Algorithms 3 and 4, also its variance) is the reference from then on.

a-GPS is wider than the law and leaves chains in tails. From there a proposal goes about mu, which proposes no way back,
so that these moves alone hold a chain for thousands of updates. In the second half of burn-in every other move is
therefore one of a random walk, of random size and the same stationary law. On the banana x ~ N(0, 1),
y ~ N(x^2 / 2, 1), from N(0, 4) with 1500 updates of burn-in, E y^2 comes out right within 0.01 of its standard
deviation for lambda = 1 and 3, where without the walk it is 0.03 and 0.2 too large. There is a limit: lambda = 10
needs 5000 updates of burn-in; 1500 leave E y^2 2.4 standard deviations too large (6.6 without).

a-GPS is slow from afar: of starts that scatter by 14 standard deviations of a normal law, 1500 updates of burn-in with
lambda = 1 leave a twentieth with a mu by which they accept nothing (of starts that scatter by 3, none). Start at a MAP
estimate, or with ``warm_start_steps``.

One gradient a move; energy and gradient at theta are carried along. All coordinates move together: for tens of
parameters at most, fewer if they are correlated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from hf_bayes.core.config import MethodConfig
from hf_bayes.core.requirements import Requirements
from hf_bayes.core.rng import rand, randn
from hf_bayes.core.types import Evaluate, Info, Kernel, Problem, Rngs
from hf_bayes.distributions.approximations import Draws
from hf_bayes.distributions.energy import energy, grad_energy
from hf_bayes.methods.mcmc.checks import check_start, check_temperature
from hf_bayes.methods.sgmcmc.agps import FAMILIES, Family, Parameters, check_support


class GPSState(NamedTuple):
    """What the next update needs; V = U / T."""

    theta: Tensor
    """[M, d]"""
    potential: Tensor
    """[M] V at theta."""
    gradient: Tensor
    """[M, d] grad V at theta."""
    first: Tensor
    """[M, d] mu (or alpha): what a-GPS carries, later the reference."""
    second: Tensor
    """[M, d] sigma (or beta) with it; a Gaussian reference has no use for it."""
    mean: Tensor
    """[M, d] of theta in a-GPS."""
    variance: Tensor
    """[M, d] of theta in a-GPS."""
    step: Tensor
    """[M] int64 updates done."""


@dataclass(frozen=True, kw_only=True)
class GPSConfig(MethodConfig):
    """The exact Gaussian (or gamma, or beta) proposal sampler.

    Attributes:
        max_std: lambda, the largest standard deviation of a proposal in parameter units; None takes the run's
            learning_rate. Make it several times the posterior's.
        family: of the proposal: "gaussian"; "gamma" for parameters > 0, "beta" for parameters in (0, 1).
    """

    name: ClassVar[str] = "gps"
    max_std: float | None = None
    family: Literal["gaussian", "gamma", "beta"] = "gaussian"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_temperature(self.name, self.temperature)
        if self.max_std is not None:
            self._check_number("max_std", self.max_std, minimum=0.0, strict=True)
        self._check_choice("family", self.family, tuple(FAMILIES))

    @property
    def requirements(self) -> Requirements:
        return Requirements(all_data_in_every_update=True)

    def build(self, problem: Problem) -> Kernel:
        family, max_std = FAMILIES[self.family], self.max_std or problem.learning_rate
        explored_steps = problem.burn_in // 2

        def potential(theta: Tensor, evaluate: Evaluate) -> tuple[Tensor, Tensor]:
            evaluation, weight = evaluate(theta), self.prior_weight
            value = energy(evaluation, theta, problem.prior, prior_weight=weight)
            gradient = grad_energy(evaluation, theta, problem.prior, prior_weight=weight)
            return value / self.temperature, gradient / self.temperature

        def init(theta: Tensor, evaluate: Evaluate, rngs: Rngs) -> GPSState:
            check_support(self.name, self.family, theta)
            value, gradient = potential(theta, evaluate)
            check_start(self.name, value, gradient)
            steps = torch.zeros(len(theta), dtype=torch.int64, device=theta.device)
            variance = family.first_variance(theta)
            return GPSState(theta, value, gradient, *family.fit(theta, variance), theta, variance, steps)

        def explored(state: GPSState, matched: Parameters, moved: Tensor) -> GPSState:
            """What a-GPS carries on, and its moments; after its last update the reference."""
            weight = torch.where(moved, (state.step.to(state.theta.dtype) + 1) ** -0.75, 0.0)[:, None]
            off = state.theta - state.mean
            mean = state.mean + weight * off
            variance = (1 - weight) * (state.variance + weight * off.square())
            last, moving = (state.step == explored_steps)[:, None], moved[:, None]
            pairs = zip(family.fit(mean, variance), matched, (state.first, state.second), strict=True)
            first, second = (torch.where(last, fit, torch.where(moving, new, old)) for fit, new, old in pairs)
            return state._replace(first=first, second=second, mean=mean, variance=variance)

        def step(state: GPSState, evaluate: Evaluate, rngs: Rngs) -> tuple[GPSState, Info]:
            reference, exploring = Parameters(state.first, state.second), state.step < explored_steps
            forward = family.match(state.theta, -state.gradient, reference, max_std)
            updates = int(state.step[0])  # all chains have done the same
            walking = explored_steps < updates < problem.burn_in and updates % 2 == 0
            proposal = walk(state, family, rngs) if walking else family.draw(rngs, forward)
            value, gradient = potential(proposal, evaluate)
            log_ratio = state.potential - value
            if not walking:
                backward = family.match(proposal, -gradient, reference, max_std)
                log_ratio += (family.log_prob(state.theta, backward) - family.log_prob(proposal, forward)).sum(1)
            divergent = ~(value.isfinite() & gradient.isfinite().all(1))
            acceptance = log_ratio.clamp(max=0).exp().nan_to_num(0.0).masked_fill(divergent, 0.0)
            accepted = (rand(rngs, state.theta) < acceptance) | (exploring & ~divergent)
            moved = accepted[:, None]
            new = state._replace(
                theta=torch.where(moved, proposal, state.theta),
                potential=torch.where(accepted, value, state.potential),
                gradient=torch.where(moved, gradient, state.gradient),
                step=state.step + 1,
            )
            return explored(new, forward, exploring & accepted), {
                "acceptance": acceptance,
                "divergent": divergent.to(value.dtype),
            }

        return Kernel(init, step, lambda state, draws: Draws.from_chains(draws))


def walk(state: GPSState, family: Family, rngs: Rngs) -> Tensor:
    """[M, d]: a random walk's proposal, of a-GPS's width over sqrt(d) or down to 1 % of it."""
    size = 2.4 / math.sqrt(state.theta.shape[1]) * 0.01 ** rand(rngs, state.theta)
    proposal = state.theta + size[:, None] * state.variance.sqrt() * randn(rngs, state.theta)
    # outside the density is 0, whatever the energy says there: the chain stays
    return torch.where(family.contains(proposal).all(1, keepdim=True), proposal, state.theta)
