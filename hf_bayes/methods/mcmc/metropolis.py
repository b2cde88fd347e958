"""Random-walk Metropolis (Metropolis et al. 1953), all chains in one batch.

    theta' = theta + s c xi,   xi ~ N(0, I)
    accepted with probability min(1, exp(-(U(theta') - U(theta)) / T))

Stationary law: exp(-U / T) exactly, at any step s and any scales c [d]. Burn-in tunes both for each chain, and freezes
them with its last update. Robbins-Monro tunes s (Andrieu & Thoms 2008, section 5.1),

    log s += 2 t^-0.75 (acceptance - target),   t = 1, 2, ... since the last change of c.

c is the standard deviation of the chain's positions in three windows that double (``scale_windows``). They end in the
middle of burn-in; the second half is for s. When c changes to c', s changes by the factor mean_i((c_i / c'_i)^2)^(1/2).
For a Gaussian law with standard deviations c', the acceptance depends on sum_i (s c_i / c'_i)^2, so this factor keeps
it. Without c, one s has to suit the narrowest direction, and the chain crosses a direction k times as wide k^2 times as
slowly.

After burn-in the chain is time-homogeneous. An update takes one energy and no gradient; the state holds the energy at
theta. The method suits tens of parameters: s falls as d^-1/2, and an independent draw takes O(d) updates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from hf_bayes.core.config import MethodConfig
from hf_bayes.core.requirements import OwnRate, Requirements
from hf_bayes.core.rng import rand, randn
from hf_bayes.core.types import Evaluate, Info, Kernel, Problem, Rngs
from hf_bayes.distributions.approximations import keep_draws
from hf_bayes.distributions.energy import energy
from hf_bayes.methods.mcmc.checks import check_temperature
from hf_bayes.methods.mcmc.learnt_scales import add_position, place_of, scales_of

LEAST_BURN_IN = 160
"""The shortest burn-in that learns scales: its first window then has 10 positions."""


class MetropolisState(NamedTuple):
    """The position, its energy, and the adapted proposal."""

    theta: Tensor
    """[M, d]"""
    energy: Tensor
    """[M] in nats, with the prior's weight."""
    log_std: Tensor
    """[M] log s."""
    scale: Tensor
    """[M, d] c; 1 before it is known."""
    mean: Tensor
    """[M, d] mean of the positions in this window."""
    squares: Tensor
    """[M, d] sum of the squared deviations from ``mean``."""
    step: Tensor
    """[M] int64, number of updates done."""


@dataclass(frozen=True, kw_only=True)
class MetropolisConfig(MethodConfig):
    """Random-walk Metropolis.

    Attributes:
        proposal_std: standard deviation of the proposal in parameter units; None takes the run's learning_rate. With
            burn-in it is the start of the adaptation; without burn-in it does not change.
        target_acceptance: target acceptance rate of the adaptation; 0.234 is optimal in many dimensions, 0.44 in one
            (Roberts & Rosenthal 2001). None: no adaptation.
        adapt_scale: learn a scale for each parameter, too (never in burn-ins below ``LEAST_BURN_IN`` updates).
    """

    name: ClassVar[str] = "metropolis"
    proposal_std: float | None = None
    target_acceptance: float | None = 0.234
    adapt_scale: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_temperature(self.name, self.temperature)
        if self.proposal_std is not None:
            self._check_number("proposal_std", self.proposal_std, minimum=0.0, strict=True)
        if self.target_acceptance is not None:
            self._check_number("target_acceptance", self.target_acceptance, minimum=0.0, maximum=1.0, strict=True)
        self._check_flag("adapt_scale", self.adapt_scale)

    @property
    def requirements(self) -> Requirements:
        rate: OwnRate = "given" if self.proposal_std is None else "unused"
        adapts = self.target_acceptance is not None
        return Requirements(
            all_data_in_every_update=True, learning_rate=rate, follows_schedule=False, adapts_step=adapts
        )

    def build(self, problem: Problem) -> Kernel[MetropolisState]:
        first_std = self.proposal_std if self.proposal_std is not None else problem.learning_rate
        adapted_steps = 0 if self.target_acceptance is None else problem.burn_in
        windows = scale_windows(adapted_steps) if self.adapt_scale else ()

        def energy_at(theta: Tensor, evaluate: Evaluate) -> Tensor:
            return energy(evaluate(theta, gradient=False), theta, problem.prior, prior_weight=self.prior_weight)

        def init(theta: Tensor, evaluate: Evaluate, rngs: Rngs) -> MetropolisState:
            start = energy_at(theta, evaluate)
            log_std = theta.new_full((len(theta),), first_std).log()
            steps = torch.zeros(len(theta), dtype=torch.int64, device=theta.device)
            zeros = torch.zeros_like(theta)
            return MetropolisState(theta, start, log_std, torch.ones_like(theta), zeros, zeros.clone(), steps)

        def step(state: MetropolisState, evaluate: Evaluate, rngs: Rngs) -> tuple[MetropolisState, Info]:
            std = state.log_std.exp()
            proposal = state.theta + std[:, None] * state.scale * randn(rngs, state.theta)
            proposed = energy_at(proposal, evaluate)
            # an infinite or NaN energy means a proposal outside the support: its probability is 0, and the chain stays
            divergent = ~proposed.isfinite()
            log_ratio = (state.energy - proposed) / self.temperature
            acceptance = log_ratio.clamp(max=0).exp().masked_fill(divergent, 0.0)
            accepted = rand(rngs, state.theta) < acceptance
            fields = state._asdict() | {
                "theta": torch.where(accepted[:, None], proposal, state.theta),
                "energy": torch.where(accepted, proposed, state.energy),
                "step": state.step + 1,
            }
            moved = MetropolisState(**fields)
            new = self._tuned(moved, acceptance, adapted_steps, windows)
            return new, {"acceptance": acceptance, "step_size": std, "divergent": divergent.to(std.dtype)}

        return Kernel(init, step, keep_draws, functions_of_theta=("energy",))

    def _tuned(
        self, state: MetropolisState, acceptance: Tensor, adapted_steps: int, windows: tuple[int, ...]
    ) -> MetropolisState:
        """Return the state with the s, and at the end of a window the c, of the next update."""
        done = int(state.step[0])  # all chains have done the same number of updates
        if self.target_acceptance is None or done > adapted_steps:
            return state
        place = place_of(done, windows)
        # 2 is 1 / |d acceptance / d log s| at 0.234 for a Gaussian in many dimensions: the fastest gain that is stable
        gain = 2.0 * place.since**-0.75
        shortfall = acceptance.to(state.log_std.dtype) - self.target_acceptance
        state = state._replace(log_std=state.log_std + gain * shortfall)
        if place.position:
            mean, squares = add_position(state.theta, state.mean, state.squares, place.position)
            state = state._replace(mean=mean, squares=squares)
            if done in windows:
                state = _with_scale(state, place.position)
        return state


def scale_windows(adapted_steps: int) -> tuple[int, ...]:
    """Return the edges of the windows in which positions are collected; none in a short burn-in."""
    if adapted_steps < LEAST_BURN_IN:
        return ()
    return tuple(adapted_steps // part for part in (16, 8, 4, 2))


def _with_scale(state: MetropolisState, count: int) -> MetropolisState:
    """Return the state with the window's standard deviations as c, and the s that keeps the acceptance.

    An independent draw takes about 3 d updates, so a window holds count / 3 d of them. The logarithms are shrunk
    towards their mean with the weight of one independent draw.
    """
    scale = scales_of(state.squares, count, weight=3 * state.theta.shape[1], before=state.scale)
    factor = (state.scale / scale).square().mean(1).log() / 2
    return state._replace(scale=scale, log_std=state.log_std + factor)
