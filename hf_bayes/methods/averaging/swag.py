"""SWAG: a Gaussian through an optimiser's iterates, low rank plus diagonal (Maddox et al. 2019).

    N(mean, (S + D D' / (K - 1)) / 2)

from n collected iterates: their mean, S = diag of their variances (the mean of the squares minus the square of the
mean), and D, the deviations of the last K iterates from the mean at that time (Algorithm 1). The iterates are the
iterates of ``swa``. Several chains give an equally weighted mixture, MultiSWAG (Wilson and Izmailov 2020).

It has no stationary law of its own. With SGD it is a Gaussian through the draws of ``sgd_mc``; with AdamW, the default,
its width is set by AdamW's learning rate.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from hf_bayes.core.joined_states import inner_state, with_inner
from hf_bayes.core.requirements import Requirements
from hf_bayes.core.types import Evaluation, Info, Problem, Rngs, Rule
from hf_bayes.distributions.approximations import Gaussian
from hf_bayes.distributions.covariance import LowRank
from hf_bayes.methods.averaging.swa import Collector, SWAConfig, beside, locate_at_iterate

VARIANCE_FLOOR = 1e-30
"""The variance of a coordinate that never moved, as in the paper's code."""


class IterateMoments(NamedTuple):
    """The moments of the iterates collected so far, with M chains in rows."""

    mean: Tensor
    """[M, d]"""
    squares: Tensor
    """[M, d] sum of squared deviations from the mean. (E theta^2 - (E theta)^2 would round small variances away.)"""
    deviations: Tensor
    """[M, K, d] deviations of the last K iterates, newest last; zeros while there are fewer than K."""

    @classmethod
    def none(cls, theta: Tensor, rank: int) -> IterateMoments:
        """Return the moments of zero iterates."""
        return cls(theta, torch.zeros_like(theta), theta.new_zeros(len(theta), rank, theta.shape[1]))

    def collect(self, theta: Tensor, count: int) -> IterateMoments:
        """Return the moments with ``theta`` [M, d] as iterate number ``count`` (from 1), by Welford's recursion."""
        mean = torch.lerp(self.mean, theta, 1 / count)
        deviation = theta - mean
        squares = self.squares + (theta - self.mean) * deviation if count > 1 else self.squares
        return IterateMoments(mean, squares, torch.cat([self.deviations[:, 1:], deviation[:, None]], 1))

    def gaussian(self, count: int) -> Gaussian:
        """Return the Gaussian of ``count`` iterates, with one component per chain."""
        std = (self.squares / (2 * max(1, count))).clamp_min(VARIANCE_FLOOR).sqrt()
        columns = min(count, self.deviations.shape[1])
        weight = 1 / (2 * max(1, columns - 1))
        # one chain after the other, because each needs copies of its deviations, which are most of the state
        parts = tuple(LowRank.plus(s, chain.mT, weight) for s, chain in zip(std, self.deviations, strict=True))
        return Gaussian(self.mean, parts)


@dataclass(frozen=True, kw_only=True)
class SWAGConfig(SWAConfig):
    """A Gaussian through an optimiser's iterates after burn-in. A chain ends in one Gaussian.

    Attributes:
        rank: K, the number of deviations kept (the state holds K tensors of the size of theta).
    """

    name: ClassVar[str] = "swag"
    rank: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_count("rank", self.rank, minimum=2)

    @property
    def requirements(self) -> Requirements:
        return replace(super().requirements, draws_are_chain_states=False)

    def through(self, draws: Tensor) -> Gaussian:
        """Return SWAG's Gaussian through ``draws`` [S, d] of any method, in their order.

        Raises:
            ValueError: for fewer than two draws.
        """
        if draws.ndim != 2 or len(draws) < 2:
            raise ValueError(f"draws must be [S >= 2, d], got {list(draws.shape)}")
        moments = IterateMoments.none(draws[:1], self.rank)
        for count, draw in enumerate(draws.split(1), start=1):
            moments = moments.collect(draw, count)
        return moments.gaussian(len(draws))

    def build(self, problem: Problem) -> Rule[Any]:
        collector, optimiser = Collector.of(self, problem, minimum=2), self.iterates(problem)

        def init(theta: Tensor, rngs: Rngs) -> Any:
            none = IterateMoments.none(theta, self.rank)
            return beside(optimiser.init(theta, rngs), theta=theta, squares=none.squares, deviations=none.deviations)

        def update(state: Any, evaluation: Evaluation, lr: float, rngs: Rngs) -> tuple[Any, Info]:
            iterate, info = optimiser.update(inner_state(state), evaluation, lr, rngs)
            count, now = collector.collected(iterate.step)
            moments = IterateMoments(state.theta if count else iterate.theta, state.squares, state.deviations)
            mean, squares, deviations = moments.collect(iterate.theta, count) if now else moments
            own = {"theta": mean, "squares": squares, "deviations": deviations, "step": iterate.step}
            return with_inner(state, iterate)._replace(**own), info

        def finish(state: Any, draws: Tensor) -> Gaussian:
            count, _ = collector.collected(state.step)
            if count < 2:
                warnings.warn(f"swag has collected {count} iterates: its Gaussian has no spread. Train longer")
            return IterateMoments(state.theta, state.squares, state.deviations).gaussian(count)

        return Rule(init, locate_at_iterate, update, finish)
