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

A single gradient brings the noise of its minibatch into h. The relative variance v of h is then about (rows of the
data / rows of the update), and a standard deviation of q has the relative error sqrt(v / n) / 2 after n averaged
updates, whatever rho is: the error is noise, not bias. So one update in ``pair_period`` = p takes a second gradient, at
mean - delta on the same rows. The odd half of the pair, in the place of g in h, does not have the noise of the
minibatch. The rate of such an update is r = p rho / (1 + (p - 1) a), and a r in the others, so that its mean over p
updates stays rho. a weighs both kinds of h by their variances, which are learned: a = v of pairs / v of single
gradients, at most 1 (without minibatch noise) and at least 1 / p. The weights depend on past draws only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from hf_bayes.core.column_blocks import in_blocks
from hf_bayes.core.config import MethodConfig
from hf_bayes.core.requirements import Requirements
from hf_bayes.core.rng import randn
from hf_bayes.core.types import Evaluation, Info, Problem, Rngs, Rule
from hf_bayes.distributions.approximations import Gaussian
from hf_bayes.methods.variational.gaussian_vi import (
    GradientsOfDraws,
    averaging_weight,
    draw_pairs,
    gaussian_entropy,
    other_points,
    over_pairs,
    parts,
    refuse_unpaired_draw,
    refuse_zero_temperature,
)

SPREAD_RATE = 0.01
"""The rate of the running means of squares: a memory of 100 updates with a pair, and of 100 without one."""


class IVONState(NamedTuple):
    """q, and the draws at which ``update`` receives gradients.

    Attributes:
        theta: [M, d] mean of q (averaged over iterates).
        variance: [M, d] variance of q (averaged over iterates).
        iterate: [M, d] the last mean.
        precision: [M, d] s of the last iterate.
        gradient: [M, d] g_bar.
        noise: [M, P, d] eps of the current draw, or of the current pairs of draws.
        squared_changes: [M, 2] running means of ((h - s) / s)^2 from 0 on, from single gradients and from pairs.
        step: [M] int64, number of updates done.
    """

    theta: Tensor
    variance: Tensor
    iterate: Tensor
    precision: Tensor
    gradient: Tensor
    noise: Tensor
    squared_changes: Tensor
    step: Tensor


@dataclass(frozen=True, kw_only=True)
class IVONConfig(MethodConfig):
    """Natural-gradient mean-field variational inference, at nearly the cost of AdamW.

    The learning rate is a fraction of Newton's step, in (0, 1]. Without one it is 1 / sqrt(number of updates). A chain
    ends in one Gaussian; ``draws_per_chain`` is not used.

    Attributes:
        init_std: standard deviation of q at the start, in parameter units.
        num_draws: k, the gradients of an update: 1 or an even number, for k / 2 antithetic pairs of draws on the same
            rows. An update costs k gradients, and the number of updates stays as given.
        momentum: beta of the gradient's running mean.
        precision_rate: rho, the share of a new estimate in the precision of q, in (0, 1). It follows the schedule of
            the learning rate; None makes it equal to the learning rate.
        pair_period: with ``num_draws=1``, every ``pair_period``-th update, the first one included, takes a pair of
            draws. An update costs 1 + 1 / pair_period gradients on average. None: no update does.
    """

    name: ClassVar[str] = "ivon"
    num_chains: int = 1
    init_std: float = 0.01
    num_draws: int = 1
    momentum: float = 0.9
    precision_rate: float | None = None
    pair_period: int | None = 14

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_zero_temperature(self.name, self.temperature)
        self._check_number("init_std", self.init_std, minimum=0.0, strict=True)
        self._check_count("num_draws", self.num_draws, minimum=1)
        refuse_unpaired_draw(self.name, self.num_draws)
        self._check_number("momentum", self.momentum, minimum=0.0, maximum=1.0)
        if self.precision_rate is not None:
            self._check_number("precision_rate", self.precision_rate, minimum=0.0, maximum=1.0, strict=True)
        if self.pair_period is not None:
            self._check_count("pair_period", self.pair_period, minimum=2)

    @property
    def requirements(self) -> Requirements:
        found = Requirements(
            learning_rate="from_length", draws_are_chain_states=False, gradients_per_update=self.num_draws
        )
        if self.num_draws > 1 or self.pair_period is None:
            return found
        return replace(found, gradients_per_update=1 + Fraction(1, self.pair_period))

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
            squared_changes = theta.new_zeros(len(theta), 2)
            return IVONState(theta, self.temperature / precision, theta, precision, zero, noise, squared_changes, steps)

        def locate(state: IVONState, rngs: Rngs) -> tuple[Tensor, IVONState]:
            state = state._replace(noise=draw_pairs(lambda: randn(rngs, state.theta), self.num_draws))
            return self._draw(state, 0, 1), state

        def anchor(state: IVONState) -> Tensor | None:
            return other_points(partial(self._draw, state), self._draws_of_update(state))

        def update(state: IVONState, evaluation: Evaluation, lr: float, rngs: Rngs) -> tuple[IVONState, Info]:
            return self._update(state, evaluation, lr, problem)

        def finish(state: IVONState, draws: Tensor) -> Gaussian:
            return Gaussian.diagonal(state.theta, state.variance.sqrt())

        return Rule(init, locate, update, finish, anchor=anchor)

    def _update(self, state: IVONState, evaluation: Evaluation, lr: float, problem: Problem) -> tuple[IVONState, Info]:
        count = int(state.step[0]) + 1  # all chains have done the same updates
        weight, unbias = averaging_weight(problem, count), 1 / (1 - self.momentum**count)
        num_draws = self._draws_of_update(state)
        rho = lr if self.precision_rate is None else self.precision_rate * lr / problem.learning_rate
        rates = rho * self._weight(state, num_draws)
        draws = GradientsOfDraws.of(
            evaluation, problem.prior, partial(self._draw, state), num_draws=num_draws, weight=self.prior_weight
        )
        log_prior, sums_of_logs = draws.sources[0].log_prior, state.theta.new_zeros(len(state.theta), 2)
        squares = torch.zeros_like(state.squared_changes[:, 0])

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
            x = over_pairs(odd * delta / self.temperature)  # (h - s) / s
            squares.add_(x.square().sum(1))
            x = (rates * x).clamp_(-1, 1)
            sums_of_logs[:, 0] -= 0.5 * precision.log().sum(1)
            precision = precision * (1 + x + 0.5 * x.square())
            theta, variance = theta.lerp(moved, weight), variance.lerp(self.temperature / precision, weight)
            sums_of_logs[:, 1] += 0.5 * variance.log().sum(1)
            return theta, variance, moved, precision, running

        tensors = *state[:-2], *draws.tensors
        theta, variance, mean, precision, running = in_blocks(advance, *tensors)
        dim, squared_changes, kind = state.theta.shape[1], state.squared_changes.clone(), int(num_draws > 1)
        squared_changes[:, kind].lerp_(squares / dim, SPREAD_RATE)
        new = IVONState(theta, variance, mean, precision, running, state.noise, squared_changes, state.step + 1)
        sum_of_log_stds = sums_of_logs[:, 0] + 0.5 * dim * math.log(self.temperature)
        drawn_energy = -evaluation.log_lik - self.prior_weight * log_prior
        free_energy = drawn_energy - self.temperature * gaussian_entropy(sum_of_log_stds, dim)
        return new, {"free_energy": free_energy, "std": (sums_of_logs[:, 1] / dim).exp()}

    def _draws_of_update(self, state: IVONState) -> int:
        """Return the number of draws of the next update."""
        is_pair = self.num_draws == 1 and self.pair_period is not None and int(state.step[0]) % self.pair_period == 0
        return 2 if is_pair else self.num_draws

    def _weight(self, state: IVONState, num_draws: int) -> Tensor:
        """Return the rate of an update of ``num_draws``, divided by its mean over updates; [M, 1]."""
        period, done = self.pair_period, int(state.step[0])
        if self.num_draws > 1 or period is None:
            return torch.ones_like(state.squared_changes[:, :1])
        num_pairs = -(-done // period)
        known = [1 - (1 - SPREAD_RATE) ** number for number in (done - num_pairs, num_pairs)]  # as in Adam
        ratio = torch.ones_like(state.squared_changes[:, :1])
        if all(known):
            single, pair = state.squared_changes.split(1, 1)
            tiny = torch.finfo(single.dtype).tiny
            ratio = ((pair / known[1] + tiny) / (single / known[0] + tiny)).clamp(1 / period, 1)
        return (1 if num_draws > 1 else ratio) * period / (1 + (period - 1) * ratio)

    def _draw(self, state: IVONState, pair: int, sign: int) -> Tensor:
        """Return mean + sign delta [M, d] of a pair at the last iterate."""

        def draw(mean: Tensor, precision: Tensor, noise: Tensor) -> tuple[Tensor, ...]:
            return (torch.addcmul(mean, (self.temperature / precision).sqrt(), noise, value=sign),)

        return in_blocks(draw, state.iterate, state.precision, state.noise[:, pair])[0]
