"""SWAG: a Gaussian through SGD's iterates, low rank plus diagonal (Maddox et al. 2019).

    N(mean, (S + D D' / (K - 1)) / 2)

of n collected iterates: their mean, S = diag of their variances (the mean of squares less the square of the mean), and
D the deviations of the last K from the mean at their time (Algorithm 1). The iterates are those of ``swa``. Over
several chains it is an equally weighted mixture, MultiSWAG (Wilson and Izmailov 2020).

There is no stationary law of its own: it is a Gaussian through what ``sgd_mc`` draws.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from hf_bayes.core.requirements import Requirements
from hf_bayes.core.types import Evaluation, Info, Problem, Rngs, Rule
from hf_bayes.distributions.approximations import Gaussian
from hf_bayes.distributions.covariance import LowRank
from hf_bayes.methods.averaging.sgd_mc import begin, descend
from hf_bayes.methods.averaging.swa import Collector, SWAConfig, iterate_of, locate_at_iterate

VARIANCE_FLOOR = 1e-30
"""Of a coordinate that never moved, as in the paper's code."""


class Moments(NamedTuple):
    """Of the iterates collected so far; M chains in rows."""

    mean: Tensor
    """[M, d]"""
    squares: Tensor
    """[M, d] sum of squared deviations from the mean: E theta^2 - (E theta)^2 would round small variances away."""
    deviations: Tensor
    """[M, K, d] of the last K, the newest last; zeros before there are as many."""

    @classmethod
    def none(cls, theta: Tensor, rank: int) -> Moments:
        """Of no iterates at all."""
        return cls(theta, torch.zeros_like(theta), theta.new_zeros(len(theta), rank, theta.shape[1]))

    def collect(self, theta: Tensor, count: int) -> Moments:
        """With ``theta`` [M, d], the iterate number ``count`` (from 1), by Welford's recursion."""
        mean = torch.lerp(self.mean, theta, 1 / count)
        deviation = theta - mean
        squares = self.squares + (theta - self.mean) * deviation if count > 1 else self.squares
        return Moments(mean, squares, torch.cat([self.deviations[:, 1:], deviation[:, None]], 1))

    def gaussian(self, count: int) -> Gaussian:
        """Of ``count`` iterates, a component for each chain."""
        std = (self.squares / (2 * max(1, count))).clamp_min(VARIANCE_FLOOR).sqrt()
        columns = min(count, self.deviations.shape[1])
        factors = self.deviations.mT / (2 * max(1, columns - 1)) ** 0.5
        return Gaussian(self.mean, tuple(LowRank.plus(s, f) for s, f in zip(std, factors, strict=True)))


class SWAGState(NamedTuple):
    """Moments of the collected iterates, and SGD's state."""

    theta: Tensor
    """[M, d] mean of the collected iterates; SGD's own iterate before the first one."""
    iterate: Tensor
    """[M, d] where SGD is."""
    velocity: Tensor
    """[M, d] SGD's momentum buffer."""
    step: Tensor
    """[M] int64 updates done."""
    squares: Tensor
    """[M, d] as in ``Moments``."""
    deviations: Tensor
    """[M, K, d] as in ``Moments``."""


@dataclass(frozen=True, kw_only=True)
class SWAGConfig(SWAConfig):
    """A Gaussian through SGD's iterates after burn-in; ends in one Gaussian per chain.

    Attributes:
        rank: K, the deviations kept (the state holds K times theta).
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
        """SWAG's Gaussian through ``draws`` [S, d] of any method, in their order.

        Raises:
            ValueError: for fewer than two draws.
        """
        if draws.ndim != 2 or len(draws) < 2:
            raise ValueError(f"draws must be [S >= 2, d], got {list(draws.shape)}")
        moments = Moments.none(draws[:1], self.rank)
        for count, draw in enumerate(draws.split(1), start=1):
            moments = moments.collect(draw, count)
        return moments.gaussian(len(draws))

    def build(self, problem: Problem) -> Rule:
        collector = Collector.of(self, problem, minimum=2)

        def init(theta: Tensor, rngs: Rngs) -> SWAGState:
            none = Moments.none(theta, self.rank)
            return SWAGState(theta, *begin(theta, rngs), none.squares, none.deviations)

        def update(state: SWAGState, evaluation: Evaluation, lr: float, rngs: Rngs) -> tuple[SWAGState, Info]:
            sgd, info = descend(iterate_of(state), evaluation, problem, lr, config=self)
            count, now = collector.look(sgd.step)
            moments = Moments(state.theta if count else sgd.theta, state.squares, state.deviations)
            mean, squares, deviations = moments.collect(sgd.theta, count) if now else moments
            return SWAGState(mean, *sgd, squares, deviations), info

        def finish(state: SWAGState, draws: Tensor) -> Gaussian:
            count, _ = collector.look(state.step)
            if count < 2:
                warnings.warn(f"swag has collected {count} iterates: its Gaussian has no spread. Train longer")
            return Moments(state.theta, state.squares, state.deviations).gaussian(count)

        return Rule(init, locate_at_iterate, update, finish)
