"""Random-walk Metropolis (Metropolis et al. 1953), all chains in one batch.

    theta' = theta + s xi,   xi ~ N(0, I)
    accepted with probability min(1, exp(-(U(theta') - U(theta)) / T))

Stationary law: exp(-U / T) exactly, at any proposal standard deviation s. Burn-in tunes the s of each chain by
Robbins-Monro (Andrieu & Thoms 2008, section 5.1),

    log s += 2 t^-0.75 (acceptance - target),

and freezes it with the last update of burn-in. Afterwards the chain is time-homogeneous. An update takes one energy and
no gradient; the state holds the energy at theta. The method suits tens of parameters: s falls as d^-1/2, and an
independent draw takes O(d) updates.
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
from hf_bayes.distributions.approximations import Draws
from hf_bayes.distributions.energy import energy
from hf_bayes.methods.mcmc.checks import check_start, check_temperature


class MetropolisState(NamedTuple):
    """The position, its energy, and the adapted proposal."""

    theta: Tensor
    """[M, d]"""
    energy: Tensor
    """[M] in nats, with the prior's weight."""
    log_std: Tensor
    """[M] log of the proposal's standard deviation."""
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
    """

    name: ClassVar[str] = "metropolis"
    proposal_std: float | None = None
    target_acceptance: float | None = 0.234

    def __post_init__(self) -> None:
        super().__post_init__()
        check_temperature(self.name, self.temperature)
        if self.proposal_std is not None:
            self._check_number("proposal_std", self.proposal_std, minimum=0.0, strict=True)
        if self.target_acceptance is not None:
            self._check_number("target_acceptance", self.target_acceptance, minimum=0.0, maximum=1.0, strict=True)

    @property
    def requirements(self) -> Requirements:
        rate: OwnRate = "given" if self.proposal_std is None else "unused"
        adapts = self.target_acceptance is not None
        return Requirements(all_data_in_every_update=True, learning_rate=rate, adapts_step=adapts)

    def build(self, problem: Problem) -> Kernel[MetropolisState]:
        first_std = self.proposal_std if self.proposal_std is not None else problem.learning_rate
        adapted_steps = 0 if self.target_acceptance is None else problem.burn_in

        def energy_at(theta: Tensor, evaluate: Evaluate) -> Tensor:
            return energy(evaluate(theta, gradient=False), theta, problem.prior, prior_weight=self.prior_weight)

        def init(theta: Tensor, evaluate: Evaluate, rngs: Rngs) -> MetropolisState:
            start = energy_at(theta, evaluate)
            check_start(self.name, start)
            log_std = theta.new_full((len(theta),), first_std).log()
            steps = torch.zeros(len(theta), dtype=torch.int64, device=theta.device)
            return MetropolisState(theta, start, log_std, steps)

        def step(state: MetropolisState, evaluate: Evaluate, rngs: Rngs) -> tuple[MetropolisState, Info]:
            std = state.log_std.exp()
            proposal = state.theta + std[:, None] * randn(rngs, state.theta)
            proposed = energy_at(proposal, evaluate)
            # an infinite or NaN energy means a proposal outside the support: its probability is 0, and the chain stays
            divergent = ~proposed.isfinite()
            log_ratio = (state.energy - proposed) / self.temperature
            acceptance = log_ratio.clamp(max=0).exp().masked_fill(divergent, 0.0)
            accepted = rand(rngs, state.theta) < acceptance
            new = MetropolisState(
                theta=torch.where(accepted[:, None], proposal, state.theta),
                energy=torch.where(accepted, proposed, state.energy),
                log_std=self._adapted(state, acceptance, adapted_steps),
                step=state.step + 1,
            )
            return new, {"acceptance": acceptance, "step_size": std, "divergent": divergent.to(std.dtype)}

        def finish(state: MetropolisState, draws: Tensor) -> Draws:
            return Draws.from_chains(draws)

        return Kernel(init, step, finish)

    def _adapted(self, state: MetropolisState, acceptance: Tensor, adapted_steps: int) -> Tensor:
        """Return the log proposal std of the next update, [M]; it does not change after ``adapted_steps`` updates."""
        if self.target_acceptance is None:
            return state.log_std
        # 2 is 1 / |d acceptance / d log s| at 0.234 for a Gaussian in many dimensions: the fastest gain that is stable
        gain = 2.0 * (state.step + 1).to(state.log_std.dtype) ** -0.75
        moved = state.log_std + gain * (acceptance.to(state.log_std.dtype) - self.target_acceptance)
        return torch.where(state.step < adapted_steps, moved, state.log_std)
