"""Hamiltonian Monte Carlo (Duane et al. 1987; Neal 2011), all chains in one batch.

With V = U / T, scales s and H(theta, p) = V(theta) + |p|^2 / 2, an update draws p ~ N(0, I) and makes ``num_leapfrog``
steps

    p     -= e/2 s grad V(theta)
    theta += e s p
    p     -= e/2 s grad V(theta),

It accepts the end with probability min(1, exp(-dH)). This is a diagonal mass matrix 1 / s^2, in coordinates theta / s.

Stationary law: exp(-U / T) exactly, at any e and s. Burn-in tunes both for each chain, and its last update freezes
them. Doubling or halving finds the first e (Hoffman & Gelman 2014, algorithm 4). Then Robbins-Monro, as in
``metropolis``, moves log e towards the target acceptance,

    log e += 2.5 (t + 10)^-0.75 (acceptance - target),   t = 1, 2, ... since the last change of s;

and the frozen value is an average of these log e. 2.5 is 1 / |d acceptance / d log e| at 0.8: with sigma^2 the variance
of dH, which grows as e^4, acceptance = 2 Phi(-sigma / 2), and its slope there is 2 sigma phi(sigma / 2) = 0.39. The
dual averaging of Hoffman & Gelman moves log e by up to 0.5 at a time, and acceptance is concave in log e. Frozen at the
mean of such moves, acceptance was 0.86 to 0.96 for a target of 0.8, and after burn-ins of 20 updates a quarter of the
chains accepted nothing.

s is the standard deviation of the chain's positions in windows that double, as in Stan (``mass_windows``). When s
changes to s', e changes by the factor mean_i((s_i / s'_i)^4)^(1/4). For a Gaussian law with standard deviations s' and
small e, the variance of dH is proportional to sum_i (e s_i / s'_i)^4, so this factor keeps it.

Every update uses the step e (1 + jitter (2u - 1)), with u uniform and independent of the state. Without jitter, a
trajectory as long as the period of some direction would return that direction to its start, for ever.

An update takes ``num_leapfrog`` gradients; the state holds energy and gradient at theta.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from hf_bayes.core.config import MethodConfig
from hf_bayes.core.requirements import OwnRate, Requirements
from hf_bayes.core.rng import rand, randn
from hf_bayes.core.types import Evaluate, Info, Kernel, Problem, Rngs
from hf_bayes.distributions.approximations import keep_draws
from hf_bayes.distributions.energy import energy, grad_energy
from hf_bayes.methods.mcmc.checks import check_temperature
from hf_bayes.methods.mcmc.learnt_scales import add_position, place_of, scales_of

Potential = Callable[[Tensor], tuple[Tensor, Tensor]]
"""theta [M, d] -> V = U / T [M] and its gradient [M, d]."""

MAX_ENERGY_ERROR = 1000.0
"""The largest |dH| of a trajectory that is not divergent (Stan's bound). Divergent trajectories are rejected.

The bound is symmetric in the sign of dH: it rejects a trajectory and its reversal alike, so the law stays exact.
"""


class HMCState(NamedTuple):
    """The state of the chains, with V = U / T.

    Attributes:
        theta: [M, d].
        potential: [M] V at theta.
        gradient: [M, d] grad V at theta.
        log_step: [M] log e of the next update.
        log_step_mean: [M] weighted average of log e, which is frozen at the end of burn-in.
        scale: [M, d] s.
        mean: [M, d] mean of the positions in this window.
        squares: [M, d] sum of the squared deviations from ``mean``.
        step: [M] int64, number of updates done.
    """

    theta: Tensor
    potential: Tensor
    gradient: Tensor
    log_step: Tensor
    log_step_mean: Tensor
    scale: Tensor
    mean: Tensor
    squares: Tensor
    step: Tensor


@dataclass(frozen=True, kw_only=True)
class HMCConfig(MethodConfig):
    """Hamiltonian Monte Carlo.

    Attributes:
        num_leapfrog: number of leapfrog steps (gradients) in an update.
        step_size: leapfrog step e in parameter units; None takes the run's learning_rate. With burn-in it is the start
            of the search for the first e; without burn-in it does not change.
        target_acceptance: target mean acceptance probability of the adaptation. None: no adaptation of step or mass.
        adapt_mass: learn a diagonal mass matrix in burn-in (never in burn-ins below 20 updates).
        jitter: the step of each update is uniform on e (1 +- jitter).
    """

    name: ClassVar[str] = "hmc"
    num_leapfrog: int = 10
    step_size: float | None = None
    target_acceptance: float | None = 0.8
    adapt_mass: bool = True
    jitter: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        check_temperature(self.name, self.temperature)
        self._check_count("num_leapfrog", self.num_leapfrog, minimum=1)
        if self.step_size is not None:
            self._check_number("step_size", self.step_size, minimum=0.0, strict=True)
        if self.target_acceptance is not None:
            self._check_number("target_acceptance", self.target_acceptance, minimum=0.0, maximum=1.0, strict=True)
        self._check_number("jitter", self.jitter, minimum=0.0, maximum=1.0)

    @property
    def requirements(self) -> Requirements:
        rate: OwnRate = "given" if self.step_size is None else "unused"
        adapts = self.target_acceptance is not None
        return Requirements(
            all_data_in_every_update=True, learning_rate=rate, follows_schedule=False, adapts_step=adapts
        )

    def build(self, problem: Problem) -> Kernel[HMCState]:
        first_size = self.step_size if self.step_size is not None else problem.learning_rate
        adapted_steps = 0 if self.target_acceptance is None else problem.burn_in
        windows = mass_windows(adapted_steps) if self.adapt_mass else ()

        def potential_of(evaluate: Evaluate) -> Potential:
            return self._potential(problem, evaluate)

        def init(theta: Tensor, evaluate: Evaluate, rngs: Rngs) -> HMCState:
            potential = potential_of(evaluate)
            value, gradient = potential(theta)
            size = theta.new_full((len(theta),), first_size)
            if adapted_steps > 0:
                size = find_step_size(theta, randn(rngs, theta), value, gradient, size, potential)
            mean, squares = torch.zeros_like(theta), torch.zeros_like(theta)
            done = torch.zeros(len(theta), dtype=torch.int64, device=theta.device)
            return HMCState(theta, value, gradient, size.log(), size.log(), torch.ones_like(theta), mean, squares, done)

        def step(state: HMCState, evaluate: Evaluate, rngs: Rngs) -> tuple[HMCState, Info]:
            size = state.log_step.exp()
            jittered = size * (1 + self.jitter * (2 * rand(rngs, state.theta) - 1))
            momentum = randn(rngs, state.theta)
            theta, end_momentum, value, gradient = leapfrog(
                state.theta,
                momentum,
                state.gradient,
                jittered[:, None] * state.scale,
                self.num_leapfrog,
                potential_of(evaluate),
            )
            error = energy_error(momentum, end_momentum, state.potential, value)
            divergent = error.abs() > MAX_ENERGY_ERROR
            acceptance = (-error).clamp(max=0).exp().masked_fill(divergent, 0.0)
            accepted = rand(rngs, state.theta) < acceptance
            moved = state._replace(
                theta=torch.where(accepted[:, None], theta, state.theta),
                potential=torch.where(accepted, value, state.potential),
                gradient=torch.where(accepted[:, None], gradient, state.gradient),
                step=state.step + 1,
            )
            info = {
                "acceptance": acceptance,
                "step_size": size,
                "energy_error": error,
                "divergent": divergent.to(size.dtype),
            }
            return self._tuned(moved, acceptance, adapted_steps, windows), info

        return Kernel(init, step, keep_draws, functions_of_theta=("potential", "gradient"))

    def _potential(self, problem: Problem, evaluate: Evaluate) -> Potential:
        def potential(theta: Tensor) -> tuple[Tensor, Tensor]:
            evaluation, weight = evaluate(theta), self.prior_weight
            value = energy(evaluation, theta, problem.prior, prior_weight=weight)
            gradient = grad_energy(evaluation, theta, problem.prior, prior_weight=weight)
            return value / self.temperature, gradient / self.temperature

        return potential

    def _tuned(self, state: HMCState, acceptance: Tensor, adapted_steps: int, windows: tuple[int, ...]) -> HMCState:
        """Return the state with the step size, and at the end of a window the scales, of the next update."""
        done = int(state.step[0])  # all chains have done the same number of updates
        if done > adapted_steps:
            return state
        assert self.target_acceptance is not None
        place = place_of(done, windows)
        state = with_step_size(state, self.target_acceptance - acceptance, place.since)
        if place.position:
            mean, squares = add_position(state.theta, state.mean, state.squares, place.position)
            state = state._replace(mean=mean, squares=squares)
            if done in windows:
                state = with_scale(state, place.position)
        return state._replace(log_step=state.log_step_mean) if done == adapted_steps else state


def with_step_size(state: HMCState, shortfall: Tensor, t: int) -> HMCState:
    """Return the state after Robbins-Monro update ``t`` (from 1); ``shortfall`` [M] is target - acceptance."""
    log_step = state.log_step - 2.5 * (t + 10) ** -0.75 * shortfall.to(state.log_step.dtype)
    return state._replace(log_step=log_step, log_step_mean=torch.lerp(state.log_step_mean, log_step, t**-0.75))


def mass_windows(adapted_steps: int) -> tuple[int, ...]:
    """Return the edges of the windows in which positions are collected: Stan's windows of 25, 50, 100, ... updates.

    The last window takes the remaining updates. Before the windows a chain finds the typical set (75 updates), and
    after them its step size (50 updates). With fewer than 150 updates these two phases take 15 % and 10 %. With fewer
    than 20 updates there are no windows.
    """
    if adapted_steps < 20:
        return ()
    first, after, size = (
        (75, 50, 25) if adapted_steps >= 150 else (adapted_steps * 15 // 100, adapted_steps // 10, None)
    )
    edges, last = [first], adapted_steps - after
    while size is not None and edges[-1] + 3 * size <= last:  # otherwise the next window, twice as long, would not fit
        edges.append(edges[-1] + size)
        size *= 2
    return (*edges, last)


def with_scale(state: HMCState, count: int) -> HMCState:
    """Return the state with the window's standard deviations as scales.

    Their logarithms are shrunk towards the mean logarithm, with the weight of 5 positions. The step size changes with
    the scales, so that the variance of dH stays the same for a Gaussian law with these scales.
    """
    scale = scales_of(state.squares, count, weight=5, before=state.scale)
    factor = 0.25 * (4 * (state.scale / scale).log()).logsumexp(1) - 0.25 * math.log(scale.shape[1])
    log_step = state.log_step_mean + factor
    return state._replace(scale=scale, log_step=log_step, log_step_mean=log_step)


def leapfrog(
    theta: Tensor, momentum: Tensor, gradient: Tensor, step_size: Tensor, num_leapfrog: int, potential: Potential
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Make leapfrog steps of size ``step_size`` [M, 1 or d]: time-reversible, volume-preserving, local error O(e^3).

    Returns:
        theta [M, d], momentum [M, d], V [M] and grad V [M, d] at the end. The potential is evaluated only at finite
        theta. A chain whose trajectory is no longer finite does not move, and its momentum stays non-finite.
    """
    for _ in range(num_leapfrog):
        momentum = momentum - step_size / 2 * gradient
        moved = theta + step_size * momentum
        theta = torch.where(moved.isfinite().all(1, keepdim=True), moved, theta)
        value, gradient = potential(theta)
        momentum = momentum - step_size / 2 * gradient
    return theta, momentum, value, gradient


def energy_error(start_momentum: Tensor, end_momentum: Tensor, start: Tensor, end: Tensor) -> Tensor:
    """Return dH of a trajectory, [M]; inf where it is not a number."""
    # the difference of squares element by element: for large d, two sums of d squares would lose dH in float32
    kinetic = 0.5 * ((end_momentum - start_momentum) * (end_momentum + start_momentum)).sum(1)
    error = end - start + kinetic
    return torch.where(error.isfinite(), error, torch.inf)


def find_step_size(
    theta: Tensor,
    momentum: Tensor,
    value: Tensor,
    gradient: Tensor,
    step_size: Tensor,
    potential: Potential,
) -> Tensor:
    """Double or halve ``step_size`` [M] until the acceptance of one leapfrog step crosses 1/2 (their algorithm 4)."""

    def log_acceptance(step_size: Tensor) -> Tensor:
        _, end_momentum, end, _ = leapfrog(theta, momentum, gradient, step_size[:, None], 1, potential)
        return -energy_error(momentum, end_momentum, value, end)

    log_ratio = log_acceptance(step_size)
    direction = torch.where(log_ratio > -math.log(2), 1.0, -1.0).to(step_size.dtype)
    searching = torch.ones_like(log_ratio, dtype=torch.bool)
    for _ in range(50):  # 15 decades; a potential that is flat over all of them has no scale
        searching = searching & (direction * log_ratio > -direction * math.log(2))
        if not searching.any():
            break
        step_size = torch.where(searching, step_size * 2**direction, step_size)
        log_ratio = log_acceptance(step_size)
    return step_size
