"""Stochastic weight averaging: the mean of SGD's iterates at a constant rate (Izmailov et al. 2018).

    theta_SWA = (1 / n) sum_i theta_i,   theta_i every c-th iterate after burn-in         (their Algorithm 1)

The update is the update of ``sgd_mc``. There is no stationary law: the mean converges to the mode as n grows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from hf_bayes.core.types import Evaluation, Info, Problem, Rngs, Rule
from hf_bayes.distributions.approximations import Draws
from hf_bayes.methods.averaging.sgd_mc import SGDMCConfig, SGDState, begin, descend


class SWAState(NamedTuple):
    """The average, and the state of SGD."""

    theta: Tensor
    """[M, d] mean of the collected iterates; before the first one is collected, the current iterate of SGD."""
    iterate: Tensor
    """[M, d] the current iterate of SGD."""
    velocity: Tensor
    """[M, d] SGD's momentum buffer."""
    step: Tensor
    """[M] int64, number of updates done."""


@dataclass(frozen=True, kw_only=True)
class SWAConfig(SGDMCConfig):
    """The average of SGD's iterates after burn-in. A chain ends in one draw.

    Attributes:
        collect_every: number of updates from one averaged iterate to the next (in the paper: one epoch); None collects
            about 100 iterates.
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

    def build(self, problem: Problem) -> Rule[Any]:  # a subclass may have another state
        collector = Collector.of(self, problem, minimum=1)

        def init(theta: Tensor, rngs: Rngs) -> SWAState:
            sgd = begin(theta, rngs)
            return SWAState(theta, *sgd)

        def update(state: SWAState, evaluation: Evaluation, lr: float, rngs: Rngs) -> tuple[SWAState, Info]:
            sgd, info = descend(iterate_of(state), evaluation, problem, lr, config=self)
            count, now = collector.collected(sgd.step)
            average = state.theta if count else sgd.theta
            return SWAState(torch.lerp(average, sgd.theta, 1 / count) if now else average, *sgd), info

        def finish(state: SWAState, draws: Tensor) -> Draws:
            return Draws.from_chains(draws[:, -1:])

        return Rule(init, locate_at_iterate, update, finish)


class Collector(NamedTuple):
    """The choice of the iterates to collect: every ``interval``-th one after burn-in."""

    burn_in: int
    interval: int

    @classmethod
    def of(cls, config: SWAConfig, problem: Problem, *, minimum: int) -> Collector:
        """Return the collector of a run.

        Raises:
            ValueError: if the run would collect fewer than ``minimum`` iterates.
        """
        left = problem.num_steps - problem.burn_in
        interval = config.collect_every or max(1, left // 100)
        if left // interval < minimum:
            raise ValueError(
                f"{config.name} would collect {left // interval} iterates, at least {minimum} are needed: {left} "
                f"updates after burn-in, one collected of {interval}. Lower collect_every or burn_in, or train longer"
            )
        return cls(problem.burn_in, interval)

    def collected(self, step: Tensor) -> tuple[int, bool]:
        """Return the number of collected iterates after ``step`` [M] updates, and True if the last one is collected."""
        past = int(step[0]) - self.burn_in  # all chains have done the same updates
        return max(0, past) // self.interval, past > 0 and past % self.interval == 0


class AveragedState(Protocol):
    """A state with an iterate of SGD beside theta."""

    @property
    def theta(self) -> Tensor: ...

    @property
    def iterate(self) -> Tensor: ...

    @property
    def velocity(self) -> Tensor: ...

    @property
    def step(self) -> Tensor: ...

    def _asdict(self) -> dict[str, Any]: ...


Averaged = TypeVar("Averaged", bound=AveragedState)


def iterate_of(state: AveragedState) -> SGDState:
    """Return the part of a state that belongs to SGD."""
    return SGDState(state.iterate, state.velocity, state.step)


def locate_at_iterate(state: Averaged, rngs: Rngs) -> tuple[Tensor, Averaged]:
    """Return the iterate of SGD, where the gradient is needed, and not the average."""
    return state.iterate, state
