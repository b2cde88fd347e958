"""The layerwise preconditioner of cold_posteriors (app. D, Algorithm 4): one mass for each random tensor.

Over K minibatches, during which theta does not move, with G the estimate of U / N from one minibatch:

    v_s = (1 / K) sum_k |grad_s G_k|^2 / d_s        mean square of the gradient's entries in tensor s
    sigma_s = sqrt(eps + v_s)
    M_s = sigma_s / min_r sigma_r                   the least sensitive tensor has mass 1

M then stays fixed until the next estimate, so the dynamics between two estimates keep their law. The law of the momenta
n = M^(-1/2) m does not depend on M. The paper's change of mass m' = M'^(1/2) M^(-1/2) m leaves n unchanged.

Algorithm 1 (lines 7-10) makes an estimate in each new epoch, from minibatches outside its iterations, so the schedule
pauses. Here each update of a run has its place in the schedule. The K minibatches are the first K updates of a cycle
(or of ``preconditioner_period``), so the chain skips its largest steps.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_bayes.core.layout import per_element, per_tensor_mean
from hf_bayes.core.schedules import place_in_cycle
from hf_bayes.core.types import Problem

EPSILON = 1e-7
"""eps of Algorithm 4, in the units of grad G squared."""


@dataclass(frozen=True)
class Layerwise:
    """The estimate of M, and the updates in which it is made.

    Attributes:
        problem: the run. A cycle begins after each draw.
        num_batches: K.
        period: number of updates from the beginning of one estimate to the next; None begins one with each cycle.
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
                f"the preconditioner's estimate takes {self.num_batches} of every {period} updates. theta does not "
                "move in them, and they would be the largest steps of a cycle: lower preconditioner_batches "
                f"(to {max(1, period // 10)}, say), or train longer",
                stacklevel=3,
            )

    def batches_seen(self, step: int) -> int | None:
        """Return the number of minibatches in the current estimate before update ``step``; None between estimates."""
        place = place_in_cycle(step, self.problem.draw_steps) if self.period is None else step % self.period
        seen = step if place < 0 else place  # updates before the first whole cycle are preconditioned, too
        return seen if seen < self.num_batches else None

    def observe(self, mass: Tensor, squares: Tensor, gradient: Tensor, seen: int) -> tuple[Tensor, Tensor]:
        """Return (mass, squares) after one more minibatch of an estimate; the mass changes after its last minibatch.

        Args:
            mass: [M, S] M of each tensor.
            squares: [M, S] the sum over the minibatches seen so far.
            gradient: [M, d] the minibatch's gradient of U.
            seen: number of minibatches seen so far.
        """
        added = per_tensor_mean((gradient / self.problem.num_data).square(), self.problem.sizes)
        squares = added + squares if seen > 0 else added
        if seen + 1 < self.num_batches:
            return mass, squares
        sigma = (EPSILON + squares / self.num_batches).sqrt()
        return sigma / sigma.amin(1, keepdim=True), squares

    def scale(self, mass: Tensor) -> Tensor:
        """Return M^(-1/2) of each element, [M, d]."""
        return per_element(mass.rsqrt(), self.problem.sizes)

    def start(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Return (mass, squares) at the start, [M, S] each: M = I, and no minibatch seen."""
        ones = theta.new_ones(len(theta), len(self.problem.sizes))
        return ones, torch.zeros_like(ones)
