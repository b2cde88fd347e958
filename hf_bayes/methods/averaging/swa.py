"""Stochastic weight averaging: the mean of SGD's iterates at a constant rate (Izmailov et al. 2018).

    theta_SWA = (1 / n) sum_i theta_i,   theta_i every c-th iterate after burn-in         (their Algorithm 1)

The update is that of ``sgd_mc``. There is no stationary law: the mean goes to the mode as n grows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from hf_bayes.core.types import Evaluation, Info, Problem, Rngs, Rule
from hf_bayes.distributions.approximations import Draws
from hf_bayes.methods.averaging.sgd_mc import SGDMCConfig, SGDState, begin, descend


class SWAState(NamedTuple):
    """The average, and SGD's state."""

    theta: Tensor
    """[M, d] mean of the collected iterates; SGD's own iterate before the first one."""
    iterate: Tensor
    """[M, d] where SGD is."""
    velocity: Tensor
    """[M, d] SGD's momentum buffer."""
    step: Tensor
    """[M] int64 updates done."""


@dataclass(frozen=True, kw_only=True)
class SWAConfig(SGDMCConfig):
    """The average of SGD's iterates after burn-in. A chain ends in one draw.

    Attributes:
        collect_every: updates from one averaged iterate to the next (the paper: an epoch's); None collects about 100.
    """

    name: ClassVar[str] = "swa"
    draws_per_chain: int = 1
    momentum: float = 0.9
    collect_every: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.collect_every is not None:
            self._check_count("collect_every", self.collect_every, minimum=1)
        if self.draws_per_chain != 1:
            raise ValueError(
                f"{self.name}: draws_per_chain must be 1, got {self.draws_per_chain!r}: a chain ends in one average. "
                "Use num_chains for more members"
            )

    def build(self, problem: Problem) -> Rule:
        collector = Collector.of(self, problem, minimum=1)

        def init(theta: Tensor, rngs: Rngs) -> SWAState:
            sgd = begin(theta, rngs)
            return SWAState(theta, *sgd)

        def update(state: SWAState, evaluation: Evaluation, lr: float, rngs: Rngs) -> tuple[SWAState, Info]:
            sgd, info = descend(iterate_of(state), evaluation, problem, lr, config=self)
            count, now = collector.look(sgd.step)
            average = state.theta if count else sgd.theta
            return SWAState(torch.lerp(average, sgd.theta, 1 / count) if now else average, *sgd), info

        return Rule(init, locate_at_iterate, update, lambda state, draws: Draws.from_chains(draws[:, -1:]))


class Collector(NamedTuple):
    """Which updates are collected: every ``interval``-th one after burn-in."""

    burn_in: int
    interval: int

    @classmethod
    def of(cls, config: SWAConfig, problem: Problem, *, minimum: int) -> Collector:
        """Raises ValueError if the run would collect fewer than ``minimum`` iterates."""
        left = problem.num_steps - problem.burn_in
        interval = config.collect_every or max(1, left // 100)
        if left // interval < minimum:
            raise ValueError(
                f"{config.name} would collect {left // interval} iterates, at least {minimum} are needed: {left} "
                f"updates after burn-in, one collected of {interval}. Lower collect_every or burn_in, or train longer"
            )
        return cls(problem.burn_in, interval)

    def look(self, step: Tensor) -> tuple[int, bool]:
        """How many are collected after ``step`` [M] updates, and whether the last of these is one of them."""
        past = int(step[0]) - self.burn_in  # all chains have done the same updates
        return max(0, past) // self.interval, past > 0 and past % self.interval == 0


def iterate_of(state: Any) -> SGDState:
    """SGD's part of a state."""
    return SGDState(state.iterate, state.velocity, state.step)


def locate_at_iterate(state: Any, rngs: Rngs) -> tuple[Tensor, Any]:
    """The gradient is wanted where SGD is, not at the average."""
    return state.iterate, state
