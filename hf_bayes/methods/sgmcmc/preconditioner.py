"""The layerwise preconditioner of cold_posteriors (app. D, Algorithm 4): one mass for each random tensor.

Over K minibatches, during which theta stays where it is, with G = U / N as each minibatch estimates it:

    v_s = (1 / K) sum_k |grad_s G_k|^2 / d_s        mean square of the gradient's entries in tensor s
    sigma_s = sqrt(eps + v_s)
    M_s = sigma_s / min_r sigma_r                   the least sensitive tensor has mass 1

M then stays fixed until the next estimate, so the dynamics between two estimates keep their law. Written in the momenta
n = M^(-1/2) m, whose law does not depend on M, the paper's hand-over m' = M'^(1/2) M^(-1/2) m leaves n as it is.

Algorithm 1 (lines 7-10) estimates with each new epoch, from minibatches that are none of its iterations: the schedule
stands meanwhile. Here each update of a run has its place in the schedule, and the K minibatches are the first K updates
of a cycle (or of ``preconditioner_period``): the chain misses the largest of its steps.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_bayes.core.layout import per_element, per_tensor_mean
from hf_bayes.core.schedules import place_in_cycle
from hf_bayes.core.types import Problem

EPSILON = 1e-7
"""eps of Algorithm 4, in the units of grad G squared."""


@dataclass(frozen=True)
class Layerwise:
    """When M is estimated, and how.

    Attributes:
        problem: draws begin cycles, sizes are those of the tensors.
        num_batches: K.
        period: updates from the beginning of one estimate to the next; None begins one with each cycle.
    """

    problem: Problem
    num_batches: int
    period: int | None

    def __post_init__(self) -> None:
        period = self.problem.draw_steps.step if self.period is None else self.period
        if period <= self.num_batches:
            raise ValueError(
                f"the preconditioner is estimated from {self.num_batches} minibatches every {period} updates, which "
                "leaves none to move in: lower preconditioner_batches, or raise preconditioner_period (by default the "
                "updates from one draw to the next)"
            )
        if self.num_batches > period / 2:
            warnings.warn(
                f"the preconditioner's estimate takes {self.num_batches} of every {period} updates, and theta stands "
                "still in them, which begin a cycle and would be its largest steps: lower preconditioner_batches "
                f"(to {max(1, period // 10)}, say), or train longer",
                stacklevel=3,
            )

    def batches_seen(self, step: int) -> int | None:
        """How many minibatches the estimate under way has seen before update ``step``; None outside of estimates."""
        place = place_in_cycle(step, self.problem.draw_steps) if self.period is None else step % self.period
        seen = step if place < 0 else place  # what precedes the first whole cycle is preconditioned, too
        return seen if seen < self.num_batches else None

    def observe(self, state: Any, gradient: Tensor, seen: int) -> Any:
        """The state after an update of an estimate: another minibatch's gradient of U [M, d]; M after the last one."""
        squares = per_tensor_mean((gradient / self.problem.num_data).square(), self.problem.sizes)
        if seen > 0:
            squares += state.squares
        state = state._replace(squares=squares, step=state.step + 1)
        if seen + 1 < self.num_batches:
            return state
        sigma = (EPSILON + squares / self.num_batches).sqrt()
        return state._replace(mass=sigma / sigma.amin(1, keepdim=True))

    def scale(self, mass: Tensor) -> Tensor:
        """[M, d]: M^(-1/2) of each element."""
        return per_element(mass.rsqrt(), self.problem.sizes)

    def start(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """[M, S] each: M = I, and no minibatch seen."""
        ones = theta.new_ones(len(theta), len(self.problem.sizes))
        return ones, torch.zeros_like(ones)
