"""Natural-gradient variational inference: improved variational online Newton (IVON).

Lin, Schmidt and Khan 2020 (the update that keeps precisions positive); Shen et al. 2024 (IVON). For q = N(mean, T / s),
with s the precision of U, delta = theta - mean, eps = delta sqrt(s / T), and g = grad U(theta) - s delta:

    g_bar = beta g_bar + (1 - beta) g                                 E[g]     = E_q[grad U]
    h     = s + g delta s / T                                         E[h]     = E_q[diag of the Hessian of U]
    s     = s + rho (h - s) + rho^2 (h - s)^2 / (2 s)
    mean  = mean - l g_bar / ((1 - beta^t) s)

These are natural gradients of F(q) = E_q[U] - T H[q], so l is a fraction of Newton's step and has no units. The fixed
point is the optimum of ``mean_field``: for a Gaussian posterior with covariance S at T = 1, its mean and the precision
diag(S^-1) / T. s > 0 always, as 1 + x + x^2 / 2 > 0 for all x.

Differences from Shen et al.: the prior is a part of U (there it is the weight decay delta, and s = N (h + delta)).
s delta is subtracted from the gradient. It has expectation 0 in the mean and s in h, and cancels all noise of a
diagonal Gaussian posterior. Both rates are 1 / sqrt(n) in a run of n updates: the start is forgotten by the factor
exp(-sqrt(n)), and q is the average of the mean and of the variance T / s over the second half. (At stationarity
E[(h - s) / s] = 0, so the average of 1 / s is unbiased, to third order in rho; the averages of s and log s are not.)
A step of the mean is at most one standard deviation of q in each coordinate, and |rho (h - s) / s| at most 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from hf_bayes.core.column_blocks import in_blocks
from hf_bayes.core.requirements import Requirements
from hf_bayes.core.rng import randn
from hf_bayes.core.types import Evaluation, Info, Problem, Rngs, Rule
from hf_bayes.distributions.approximations import Gaussian
from hf_bayes.methods.variational.gaussian_vi import (
    GaussianVIConfig,
    GradientsOfDraws,
    averaging_weight,
    draw_pairs,
    gaussian_entropy,
    other_points,
    over_pairs,
    parts,
)


class IVONState(NamedTuple):
    """q, and the draws at which ``update`` receives gradients.

    Attributes:
        theta: [M, d] mean of q (averaged over iterates).
        variance: [M, d] variance of q (averaged over iterates).
        iterate: [M, d] the last mean.
        precision: [M, d] s of the last iterate.
        gradient: [M, d] g_bar.
        noise: [M, P, d] eps of the current draw, or of the current pairs of draws.
        step: [M] int64, number of updates done.
    """

    theta: Tensor
    variance: Tensor
    iterate: Tensor
    precision: Tensor
    gradient: Tensor
    noise: Tensor
    step: Tensor


@dataclass(frozen=True, kw_only=True)
class IVONConfig(GaussianVIConfig):
    """Natural-gradient mean-field variational inference, at the cost of AdamW.

    The learning rate is a fraction of Newton's step, in (0, 1]. Without one it is 1 / sqrt(number of updates).

    Attributes:
        momentum: beta of the gradient's running mean.
        precision_rate: rho, the share of a new estimate in the precision of q, in (0, 1). It follows the schedule of
            the learning rate; None makes it equal to the learning rate.
    """

    name: ClassVar[str] = "ivon"
    momentum: float = 0.9
    precision_rate: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_number("momentum", self.momentum, minimum=0.0, maximum=1.0)
        if self.precision_rate is not None:
            self._check_number("precision_rate", self.precision_rate, minimum=0.0, maximum=1.0, strict=True)

    @property
    def requirements(self) -> Requirements:
        return replace(super().requirements, learning_rate="from_length")

    def build(self, problem: Problem) -> Rule[IVONState]:
        if problem.learning_rate > 1:
            raise ValueError(
                f"{self.name}: learning_rate must be at most 1, got {problem.learning_rate:g}: it is a fraction of "
                "Newton's step. Leave it out to get 1 / sqrt(number of updates)"
            )

        def init(theta: Tensor, rngs: Rngs) -> IVONState:
            zero = torch.zeros_like(theta)
            precision = torch.full_like(theta, self.temperature / self.init_std**2)
            steps = torch.zeros(len(theta), dtype=torch.int64, device=theta.device)
            noise = draw_pairs(lambda: zero, self.num_draws)
            return IVONState(theta, self.temperature / precision, theta, precision, zero, noise, steps)

        def locate(state: IVONState, rngs: Rngs) -> tuple[Tensor, IVONState]:
            state = state._replace(noise=draw_pairs(lambda: randn(rngs, state.theta), self.num_draws))
            return self._draw(state, 0, 1), state

        def anchor(state: IVONState) -> Tensor | None:
            return other_points(partial(self._draw, state), self.num_draws)

        def update(state: IVONState, evaluation: Evaluation, lr: float, rngs: Rngs) -> tuple[IVONState, Info]:
            return self._update(state, evaluation, lr, problem)

        def finish(state: IVONState, draws: Tensor) -> Gaussian:
            return Gaussian.diagonal(state.theta, state.variance.sqrt())

        return Rule(init, locate, update, finish, anchor=anchor)

    def _update(self, state: IVONState, evaluation: Evaluation, lr: float, problem: Problem) -> tuple[IVONState, Info]:
        count = int(state.step[0]) + 1  # all chains have done the same updates
        weight, unbias = averaging_weight(problem, count), 1 / (1 - self.momentum**count)
        rho = lr if self.precision_rate is None else self.precision_rate * lr / problem.learning_rate
        draws = GradientsOfDraws.of(
            evaluation, problem.prior, partial(self._draw, state), num_draws=self.num_draws, weight=self.prior_weight
        )
        log_prior, sums_of_logs = draws.sources[0].log_prior, torch.zeros_like(state.theta[:, :2])

        def advance(
            theta: Tensor,
            variance: Tensor,
            mean: Tensor,
            precision: Tensor,
            running: Tensor,
            noise: Tensor,
            *of: Tensor,
        ) -> tuple[Tensor, ...]:
            nonlocal log_prior
            std = (self.temperature / precision).sqrt()
            delta = std[:, None] * noise
            part, found = draws.at(lambda pair, sign: torch.add(mean, delta[:, pair], alpha=sign), of)
            log_prior = log_prior + part
            even, odd = parts(found, precision[:, None] * delta)
            running = torch.lerp(even, running, self.momentum)
            moved = mean - (lr * unbias * running / precision).clamp(-std, std)
            x = over_pairs(rho / self.temperature * odd * delta).clamp_(-1, 1)  # rho (h - s) / s
            sums_of_logs[:, 0] -= 0.5 * precision.log().sum(1)
            precision = precision * (1 + x + 0.5 * x.square())
            theta, variance = theta.lerp(moved, weight), variance.lerp(self.temperature / precision, weight)
            sums_of_logs[:, 1] += 0.5 * variance.log().sum(1)
            return theta, variance, moved, precision, running

        tensors = *state[:-1], *draws.tensors
        theta, variance, mean, precision, running = in_blocks(advance, *tensors)
        new = IVONState(theta, variance, mean, precision, running, state.noise, state.step + 1)
        dim = state.theta.shape[1]
        sum_of_log_stds = sums_of_logs[:, 0] + 0.5 * dim * math.log(self.temperature)
        drawn_energy = -evaluation.log_lik - self.prior_weight * log_prior
        free_energy = drawn_energy - self.temperature * gaussian_entropy(sum_of_log_stds, dim)
        return new, {"free_energy": free_energy, "std": (sums_of_logs[:, 1] / dim).exp()}

    def _draw(self, state: IVONState, pair: int, sign: int) -> Tensor:
        """Return mean + sign delta [M, d] of a pair at the last iterate."""

        def draw(mean: Tensor, precision: Tensor, noise: Tensor) -> tuple[Tensor, ...]:
            return (torch.addcmul(mean, (self.temperature / precision).sqrt(), noise, value=sign),)

        return in_blocks(draw, state.iterate, state.precision, state.noise[:, pair])[0]
