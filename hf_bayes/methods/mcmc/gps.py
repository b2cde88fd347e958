"""Exact GPS: Metropolis-Hastings with the proposal of ``sgmcmc/agps.py`` (agps, app. C), all chains in one batch.

With s = -grad U / T and a reference mu that is the same for both ends of a move, elementwise

    sigma^2(theta) = |theta - mu| / |s(theta)|                      eqs 3 and 7
    m(theta) = theta + sigma^2(theta) s(theta)
    theta' ~ q(. | theta) = N(m(theta), min(sigma(theta), lambda)^2)
    accepted with probability min(1, exp(-dU / T) q(theta | theta') / q(theta' | theta))

Stationary law: exp(-U / T) exactly. The paper's Algorithm 2 is not a valid kernel: it carries mu_t from move to move,
so the reverse move uses another mu than its q(theta | theta') assumes, and the weights of modes are wrong. Here the
first half of burn-in is a-GPS itself, which accepts every finite proposal. Its mean (with ``family`` gamma or beta,
Algorithms 3 and 4, also its variance) is the reference afterwards.

a-GPS is wider than the law and leaves chains in the tails. A proposal from there moves close to mu, where the reverse
move is improbable, so these moves alone hold a chain for thousands of updates. In the second half of burn-in every
other move is therefore a random walk of random size, with the same stationary law. On the banana x ~ N(0, 1),
y ~ N(x^2 / 2, 1), from N(0, 4) with 1500 updates of burn-in, E y^2 is correct within 0.01 of its standard deviation for
lambda = 1 and 3; without the walk it is 0.03 and 0.2 too large. lambda = 10 needs 5000 updates of burn-in: with 1500,
E y^2 is 2.4 standard deviations too large (6.6 without the walk).

a-GPS is slow from distant starting points. With starting points that scatter by 14 standard deviations of a normal law,
1500 updates of burn-in and lambda = 1, a twentieth of the chains have a mu with which they accept nothing (none with
starting points that scatter by 3). Start at a MAP estimate, or with ``warm_start_steps``.

A move takes one gradient; the state holds energy and gradient at theta. All coordinates move together. So the method
suits tens of parameters at most, and fewer if they are correlated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from hf_bayes.core.config import MethodConfig
from hf_bayes.core.requirements import OwnRate, Requirements
from hf_bayes.core.rng import rand, randn
from hf_bayes.core.types import Evaluate, Info, Kernel, Problem, Rngs
from hf_bayes.distributions.approximations import keep_draws
from hf_bayes.distributions.energy import energy, grad_energy
from hf_bayes.methods.mcmc.checks import check_temperature
from hf_bayes.methods.sgmcmc.agps import FAMILIES, Family, Parameters, check_support


class GPSState(NamedTuple):
    """The state of the chains, with V = U / T."""

    theta: Tensor
    """[M, d]"""
    potential: Tensor
    """[M] V at theta."""
    gradient: Tensor
    """[M, d] grad V at theta."""
    first: Tensor
    """[M, d] mu (or alpha): the proposal that a-GPS carries, and later the reference."""
    second: Tensor
    """[M, d] sigma (or beta) of the same proposal; a Gaussian reference does not use it."""
    mean: Tensor
    """[M, d] mean of theta in a-GPS."""
    variance: Tensor
    """[M, d] variance of theta in a-GPS."""
    step: Tensor
    """[M] int64, number of updates done."""


@dataclass(frozen=True, kw_only=True)
class GPSConfig(MethodConfig):
    """The exact Gaussian (or gamma, or beta) proposal sampler.

    Attributes:
        max_std: lambda, the largest standard deviation of a proposal in parameter units; None takes the run's
            learning_rate. Choose several times the posterior's standard deviation.
        family: family of the proposal: "gaussian"; "gamma" for parameters > 0, "beta" for parameters in (0, 1).
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
        rate: OwnRate = "given" if self.max_std is None else "unused"
        return Requirements(all_data_in_every_update=True, learning_rate=rate, follows_schedule=False)

    def build(self, problem: Problem) -> Kernel[GPSState]:
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
            steps = torch.zeros(len(theta), dtype=torch.int64, device=theta.device)
            variance = family.first_variance(theta)
            return GPSState(theta, value, gradient, *family.fit(theta, variance), theta, variance, steps)

        def explored(state: GPSState, matched: Parameters, moved: Tensor) -> GPSState:
            """Return the state with a-GPS's proposal and moments; after its last update, with the reference."""
            weight = torch.where(moved, (state.step.to(state.theta.dtype) + 1) ** -0.75, 0.0)[:, None]
            deviation = state.theta - state.mean
            mean = state.mean + weight * deviation
            variance = (1 - weight) * (state.variance + weight * deviation.square())
            last, moving = (state.step == explored_steps)[:, None], moved[:, None]
            pairs = zip(family.fit(mean, variance), matched, (state.first, state.second), strict=True)
            first, second = (torch.where(last, fit, torch.where(moving, new, old)) for fit, new, old in pairs)
            return state._replace(first=first, second=second, mean=mean, variance=variance)

        def step(state: GPSState, evaluate: Evaluate, rngs: Rngs) -> tuple[GPSState, Info]:
            reference, exploring = Parameters(state.first, state.second), state.step < explored_steps
            forward = family.match(state.theta, -state.gradient, reference, max_std)
            updates = int(state.step[0])  # all chains have done the same number
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

        return Kernel(init, step, keep_draws, functions_of_theta=("potential", "gradient"))


def walk(state: GPSState, family: Family, rngs: Rngs) -> Tensor:
    """Return a random-walk proposal [M, d], of width between 1 % and 100 % of a-GPS's width over sqrt(d)."""
    size = 2.4 / math.sqrt(state.theta.shape[1]) * 0.01 ** rand(rngs, state.theta)
    proposal = state.theta + size[:, None] * state.variance.sqrt() * randn(rngs, state.theta)
    # outside the support the density is 0, whatever the value of the energy: the chain stays
    return torch.where(family.contains(proposal).all(1, keepdim=True), proposal, state.theta)
