"""Mean-field variational inference by reparametrisation (Kingma & Welling 2014; Blundell et al. 2015).

    q = N(mean, diag std^2),   F(q) = E_q[U] - T H[q],   theta = mean + std eps,   eps ~ N(0, I)

    dF/dmean    = E[grad U(theta)]
    dF/dlog std = E[grad U(theta) eps] std - T

Adam minimises F with a pair eps, -eps per chain and update, with several pairs, or with one eps. With
``temper="likelihood"`` U is U_lik + T U_prior, and so F is E_q[U_lik] + T KL(q || prior). Optimum: for a Gaussian
posterior with covariance S at T = 1, its mean and the precision diag(S^-1) / T.

Three properties make few draws enough. First, the entropy is exact. Second, the part of grad U(theta) that is linear in
eps, slope * eps, is learned coordinate by coordinate (least mean squares) and replaced by its expectation. As slope
depends only on past draws, both gradients stay unbiased. The noise of a Gaussian prior vanishes in this way, as if its
part were in closed form, and on a diagonal Gaussian posterior all noise vanishes. Third, q averages the iterates after
burn-in, or of the second half of the run if that is shorter (Polyak & Juditsky 1992): the remaining noise falls as
1 / sqrt(updates). The average of log std would be too small, by half the variance of its iterates. Variances are
averaged: dF/dlog std = 0 on average over the iterates means E[std^2] = T / E_q[diag of the Hessian of U].

Elements that ``points`` names have no noise: q is a point there, and F has no entropy of it. Its prior is a penalty, as
in a MAP estimate, and KL(q || prior) is over the other elements.

``estimator="stick_the_landing"`` (Roeder, Wu & Duvenaud 2017) has slope = T / std: the path derivative of log q, which
is the optimal slope at the optimum, and needs no memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from hf_bayes.core.column_blocks import in_blocks
from hf_bayes.core.rng import randn
from hf_bayes.core.types import Evaluation, Info, Problem, Rngs, Rule
from hf_bayes.distributions.approximations import Gaussian
from hf_bayes.methods.variational.gaussian_vi import (
    GradientsOfDraws,
    ReparametrisedVIConfig,
    averaging_weight,
    draw_pairs,
    gaussian_entropy,
    other_points,
    over_pairs,
    parts,
)
from hf_bayes.methods.variational.optimisers import direction
from hf_bayes.methods.variational.points import random_elements

SLOPE_RATE = 0.05
"""The rate of the least mean squares, with a memory of 20 updates.

If grad U does not depend on eps at all, it adds 3 % to the variance of the gradient in mean and 5 % in log std:
rate / (2 - 3 rate) and twice that.
"""


class MeanFieldState(NamedTuple):
    """q, the state of the optimiser, and the draws at which ``update`` receives gradients.

    Attributes:
        theta: [M, d] mean of q (averaged over iterates).
        variance: [M, d] variance of q (averaged over iterates).
        iterate: [M, 2, d] the last mean and log std.
        first, second: [M, 2, d] the optimiser's moments.
        slope: [M, d] regression of grad U(mean + std eps) on eps.
        noise: [M, P, d] eps of the current draw, or of the current pairs of draws; [M, P, 1] zeros after an update.
        step: [M] int64, number of updates done.
    """

    theta: Tensor
    variance: Tensor
    iterate: Tensor
    first: Tensor
    second: Tensor
    slope: Tensor
    noise: Tensor
    step: Tensor


@dataclass(frozen=True, kw_only=True)
class MeanFieldConfig(ReparametrisedVIConfig):
    """Mean-field Gaussian variational inference: q has independent elements."""

    name: ClassVar[str] = "mean_field"

    def build(self, problem: Problem) -> Rule[MeanFieldState]:
        return mean_field_rule(self, problem, random_elements(self.name, self.points, problem.shapes))


def mean_field_rule(config: ReparametrisedVIConfig, problem: Problem, mask: Tensor | None) -> Rule[MeanFieldState]:
    """Return the rule that minimises F over Gaussians with independent elements.

    Args:
        mask: [d] bool, False for points; None if there are no points.
    """

    def init(theta: Tensor, rngs: Rngs) -> MeanFieldState:
        log_std = torch.full_like(theta, math.log(config.init_std))
        iterate = torch.stack([theta, log_std], 1)
        zero, zeros = torch.zeros_like(theta), torch.zeros_like(iterate)
        steps = torch.zeros(len(theta), dtype=torch.int64, device=theta.device)
        variance = torch.full_like(theta, config.init_std**2)
        noise = draw_pairs(lambda: zero, config.num_draws)
        return MeanFieldState(theta, variance, iterate, zeros, zeros, zero, noise, steps)

    def locate(state: MeanFieldState, rngs: Rngs) -> tuple[Tensor, MeanFieldState]:
        noise = draw_pairs(lambda: randn(rngs, state.theta), config.num_draws)
        state = state._replace(noise=noise if mask is None else noise * mask.to(noise))
        return _draw(state, 0, 1), state

    def anchor(state: MeanFieldState) -> Tensor | None:
        return other_points(partial(_draw, state), config.num_draws)

    def update(state: MeanFieldState, evaluation: Evaluation, lr: float, rngs: Rngs) -> tuple[MeanFieldState, Info]:
        return mean_field_update(config, state, evaluation, lr, problem, mask)

    def finish(state: MeanFieldState, draws: Tensor) -> Gaussian:
        std = state.variance.sqrt()
        return Gaussian.diagonal(state.theta, std if mask is None else std * mask.to(std))

    return Rule(init, locate, update, finish, anchor=anchor)


def mean_field_update(
    config: ReparametrisedVIConfig,
    state: MeanFieldState,
    evaluation: Evaluation,
    lr: float,
    problem: Problem,
    mask: Tensor | None,
) -> tuple[MeanFieldState, Info]:
    """Return the state after one step of the optimiser on F, and the figures of the step."""
    count = int(state.step[0]) + 1  # all chains have done the same updates
    weight, optimise = averaging_weight(problem, count), direction(config.optimizer, config.momentum)
    rates = lr, config.std_learning_rate * lr / problem.learning_rate
    draws = GradientsOfDraws.of(
        evaluation, problem.prior, partial(_draw, state), num_draws=config.num_draws, weight=config.prior_weight
    )
    log_prior, sums_of_log_std = draws.sources[0].log_prior, state.theta.new_zeros(len(state.theta), 2)

    def advance(theta: Tensor, variance: Tensor, iterate: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        nonlocal log_prior
        first, second, slope, noise, *of = rest
        is_random = of.pop() if mask is not None else None
        mean, std = iterate[:, 0], iterate[:, 1].exp()
        slope = slope if config.estimator == "learned_slope" else config.temperature / std
        part, found = draws.at(lambda pair, sign: torch.addcmul(mean, std, noise[:, pair], value=sign), of)
        log_prior = log_prior + part
        even, odd = parts(found, slope[:, None] * noise)
        correlated = over_pairs(odd * noise)
        # in these units Adam's epsilon is small beside every gradient: per datum as in a HF loss, and in kT
        gradients = torch.empty_like(iterate)
        torch.div(even, problem.num_data, out=gradients[:, 0])
        torch.add(slope, correlated, out=gradients[:, 1])
        gradients[:, 1].mul_(std).div_(config.temperature).sub_(1)
        if is_random is not None:
            gradients[:, 1].mul_(is_random)
        first, second, divisor = optimise(gradients, first, second, count)
        moved = gradients  # the memory is used again
        for half, rate in enumerate(rates):
            torch.addcdiv(iterate[:, half], first[:, half], divisor[:, half], value=-rate, out=moved[:, half])
        theta, variance = theta.lerp(moved[:, 0], weight), variance.lerp((2 * moved[:, 1]).exp(), weight)
        averaged = moved[:, 1] if weight == 1 else 0.5 * variance.log()
        log_stds = torch.stack([iterate[:, 1], averaged], 1)
        sums_of_log_std.add_((log_stds if is_random is None else log_stds * is_random).sum(2))
        if config.estimator == "learned_slope":
            slope = slope.add(correlated, alpha=SLOPE_RATE)
        return theta, variance, moved, first, second, slope

    marks = () if mask is None else (mask.to(state.theta),)
    tensors = *state[:-1], *draws.tensors, *marks
    theta, variance, iterate, first, second, slope = in_blocks(advance, *tensors)
    used = torch.zeros_like(state.noise[..., :1])  # ``locate`` draws anew: until then no memory is held
    new = MeanFieldState(theta, variance, iterate, first, second, slope, used, state.step + 1)
    dim = state.theta.shape[1] if mask is None else int(mask.sum())
    drawn_energy = -evaluation.log_lik - config.prior_weight * log_prior
    free_energy = drawn_energy - config.temperature * gaussian_entropy(sums_of_log_std[:, 0], dim)
    return new, {"free_energy": free_energy, "std": (sums_of_log_std[:, 1] / dim).exp()}


def _draw(state: MeanFieldState, pair: int, sign: int) -> Tensor:
    """Return theta = mean + sign std eps [M, d] of a pair at the last iterate."""

    def draw(iterate: Tensor, noise: Tensor) -> tuple[Tensor, ...]:
        return (torch.addcmul(iterate[:, 0], iterate[:, 1].exp(), noise, value=sign),)

    return in_blocks(draw, state.iterate, state.noise[:, pair])[0]
