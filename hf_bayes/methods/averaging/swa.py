"""Stochastic weight averaging: the mean of an optimiser's iterates at a constant rate (Izmailov et al. 2018).

    theta_SWA = (1 / n) sum_i theta_i,   theta_i every c-th iterate after burn-in         (their Algorithm 1)

Their optimiser is SGD, here ``sgd_mc``. Transformers are fine-tuned with AdamW, here ``map``, which is the default.
There is no stationary law: the mean converges to the mode as n grows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from hf_bayes.core.config import MODE_PRIOR_SCALE, MethodConfig
from hf_bayes.core.joined_states import inner_state, joined_state, with_inner
from hf_bayes.core.requirements import Requirements
from hf_bayes.core.types import Evaluation, Info, Problem, Rngs, Rule
from hf_bayes.distributions.approximations import Draws
from hf_bayes.methods.averaging.map import MAPConfig
from hf_bayes.methods.averaging.sgd_mc import SGDMCConfig, refuse_temperature


@dataclass(frozen=True, kw_only=True)
class SWAConfig(MethodConfig):
    """The average of an optimiser's iterates after burn-in. A chain ends in one draw.

    Attributes:
        optimizer: "adamw", which finds its learning rate if there is none; or the paper's "sgd".
        momentum: SGD's beta, or AdamW's beta_1.
        measure_gradient_noise: with "sgd", report ``noise_temperature`` as ``SGDMCConfig`` does.
        collect_every: number of updates from one averaged iterate to the next (in the paper: one epoch); None collects
            about 100 iterates.
    """

    name: ClassVar[str] = "swa"
    num_chains: int = 1
    temperature: float = 0.0
    init_jitter: float = 0.0
    momentum: float = 0.9
    measure_gradient_noise: bool | None = None
    optimizer: Literal["adamw", "sgd"] = "adamw"
    collect_every: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_number("momentum", self.momentum, minimum=0.0, maximum=1.0)
        if self.measure_gradient_noise is not None:
            self._check_flag("measure_gradient_noise", self.measure_gradient_noise)
        refuse_temperature(self.name, self.temperature)
        self._check_choice("optimizer", self.optimizer, ("adamw", "sgd"))
        if self.collect_every is not None:
            self._check_count("collect_every", self.collect_every, minimum=1)
        if self.draws_per_chain != 1:
            raise ValueError(
                f"{self.name}: draws_per_chain must be 1, got {self.draws_per_chain!r}: a chain ends in one average. "
                "Use num_chains for more members"
            )
        if self.optimizer == "adamw" and self.measure_gradient_noise:
            raise ValueError(
                f"{self.name}: measure_gradient_noise=True reports the temperature of SGD's noise, and optimizer is "
                '"adamw": leave it out, or take optimizer="sgd"'
            )

    @property
    def requirements(self) -> Requirements:
        if self.optimizer == "sgd":
            return SGDMCConfig(measure_gradient_noise=self.measure_gradient_noise).requirements
        return Requirements(learning_rate="range_test", rate_falls=False, mode_prior_scale=MODE_PRIOR_SCALE)

    def iterates(self, problem: Problem) -> Rule[Any]:
        """Return the optimiser whose iterates are averaged."""
        config = SGDMCConfig if self.optimizer == "sgd" else MAPConfig
        return config(momentum=self.momentum, temper=self.temper).build(problem)

    def build(self, problem: Problem) -> Rule[Any]:
        collector, optimiser = Collector.of(self, problem, minimum=1), self.iterates(problem)

        def init(theta: Tensor, rngs: Rngs) -> Any:
            return beside(optimiser.init(theta, rngs), theta=theta)

        def update(state: Any, evaluation: Evaluation, lr: float, rngs: Rngs) -> tuple[Any, Info]:
            iterate, info = optimiser.update(inner_state(state), evaluation, lr, rngs)
            count, now = collector.collected(iterate.step)
            average = state.theta if count else iterate.theta
            average = torch.lerp(average, iterate.theta, 1 / count) if now else average
            return with_inner(state, iterate)._replace(theta=average, step=iterate.step), info

        def finish(state: Any, draws: Tensor) -> Draws:
            return Draws.from_chains(draws[:, -1:])

        return Rule(init, locate_at_iterate, update, finish)


def beside(iterate: Any, **own: Tensor) -> Any:
    """Return the state of an average, with that of the optimiser beside it.

    Its fields are ``own``, among them ``theta`` [M, d], the average (before the first iterate is collected, the current
    iterate); ``step`` [M]; and the optimiser's, as ``iterate_*``.
    """
    return joined_state({**own, "step": iterate.step}, iterate, prefix="iterate_")


def locate_at_iterate(state: Any, rngs: Rngs) -> tuple[Tensor, Any]:
    """Return the optimiser's iterate, where the gradient is needed, and not the average."""
    return state.iterate_theta, state


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
