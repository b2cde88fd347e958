"""The update of Gaussians with correlations: a scale for each element, and factors between elements.

    theta = mean + D kappa,   kappa = eps + W' noise,   D = diag(exp(log scale)),   cov(kappa) = A

    dF/dmean      = E[grad U]
    dF/dlog scale = E[r kappa] - (1 - c) T,   dF/dW = E[noise r'] - (1 - c) T W A^-1,   r = D grad U - c T A^-1 kappa

``low_rank_vi`` has r independent ``noise``, A = I + W' W. ``full_rank_vi`` has noise = eps and a triangular W. W has no
units, so one step size suits log scale and W.

The part c T A^-1 kappa is the path derivative of log q, and has known expectations. c = 1 sticks the landing (Roeder,
Wu and Duvenaud 2017): on a Gaussian posterior all noise vanishes at the optimum. c is learned by default, as the
running regression of D grad U on T A^-1 kappa. It depends on past draws only, so all gradients stay unbiased.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from hf_bayes.core.types import Evaluation, Info, Problem, Rngs, Rule
from hf_bayes.distributions.approximations import Gaussian
from hf_bayes.distributions.covariance import Covariance
from hf_bayes.distributions.energy import energy, grad_energy
from hf_bayes.methods.variational.gaussian_vi import (
    ReparametrisedVIConfig,
    averaging_weight,
    draw_pairs,
    gaussian_entropy,
    gradients_of,
    other_points,
    over_pairs,
    parts,
    place,
)
from hf_bayes.methods.variational.optimisers import direction

SLOPE_RATE = 0.05
"""The rate of the running regression that learns c: a memory of 20 updates."""


class FactoredState(NamedTuple):
    """q, the state of the optimiser, and the draws at which ``update`` receives gradients.

    Attributes:
        theta: [M, d] mean of q (averaged over iterates).
        moments: [M, Q, d] what the structure averages over iterates, see ``Structure.moments``.
        iterate: [M, 2 + r, d] the last mean, log scale, and W.
        first, second: [M, 2 + r, d] the optimiser's moments.
        slope: [M, 2] running products of T A^-1 kappa with D grad U and with itself.
        noise: [M, P, n] the standard normal numbers of the current draw, or of the current pairs of draws.
        step: [M] int64, number of updates done.
    """

    theta: Tensor
    moments: Tensor
    iterate: Tensor
    first: Tensor
    second: Tensor
    slope: Tensor
    noise: Tensor
    step: Tensor


class Structure(ABC):
    """The form of W [M, r, d].

    Attributes:
        is_random: [d] bool, False for points, of which D and W have no effect; None if there are no points.
    """

    is_random: Tensor | None = None

    @abstractmethod
    def factors(self, theta: Tensor, rngs: Rngs) -> Tensor:
        """Return W at the start, for theta [M, d]."""

    @abstractmethod
    def noise(self, theta: Tensor, rngs: Rngs) -> Tensor:
        """Return the standard normal numbers [M, n] of a draw."""

    @abstractmethod
    def split(self, noise: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        """Return eps [M, P, d] and noise [M, P, r]."""

    @abstractmethod
    def solve(self, factors: Tensor, kappa: Tensor) -> Tensor:
        """Return A^-1 kappa for kappa [M, P, d]."""

    @abstractmethod
    def entropy_gradient(self, factors: Tensor) -> Tensor | float:
        """Return the gradient W A^-1 of log det A / 2 in W."""

    @abstractmethod
    def free(self, gradient: Tensor) -> Tensor:
        """Return the gradient in W, with 0 in elements that are not free."""

    @abstractmethod
    def half_log_det(self, factors: Tensor) -> Tensor:
        """Return log det A / 2, [M]."""

    @abstractmethod
    def moments(self, scale: Tensor, factors: Tensor) -> Tensor:
        """Return the numbers [M, Q, d] of the covariance D A D that are averaged over iterates."""

    def largest_step(self, dim: int) -> float:
        """Return the largest change of an element of W in one update."""
        return math.inf

    @abstractmethod
    def covariance(self, moments: Tensor) -> Covariance:
        """Return the covariance of averaged moments [Q, d]."""


def factored_rule(config: ReparametrisedVIConfig, structure: Structure, problem: Problem) -> Rule[FactoredState]:
    """Return the rule that minimises F over Gaussians of a structure."""

    def init(theta: Tensor, rngs: Rngs) -> FactoredState:
        log_scale, factors = torch.full_like(theta, math.log(config.init_std)), structure.factors(theta, rngs)
        iterate = torch.cat([theta[:, None], log_scale[:, None], factors], 1)
        moments, zero = structure.moments(log_scale.exp(), factors), torch.zeros_like(structure.noise(theta, rngs))
        noise = draw_pairs(lambda: zero, config.num_draws)
        zeros, steps = torch.zeros_like(iterate), torch.zeros(len(theta), dtype=torch.int64, device=theta.device)
        slope = theta.new_zeros(len(theta), 2)
        return FactoredState(theta, moments, iterate, zeros, zeros, slope, noise, steps)

    def locate(state: FactoredState, rngs: Rngs) -> tuple[Tensor, FactoredState]:
        noise = draw_pairs(lambda: structure.noise(state.theta, rngs), config.num_draws)
        state = state._replace(noise=noise)
        return _draw(structure, state, 0, 1), state

    def anchor(state: FactoredState) -> Tensor | None:
        return other_points(partial(_draw, structure, state), config.num_draws)

    def finish(state: FactoredState, draws: Tensor) -> Gaussian:
        return Gaussian(state.theta, tuple(map(structure.covariance, state.moments)))

    return Rule(init, locate, partial(_update, config, structure, problem), finish, anchor=anchor)


def _update(
    config: ReparametrisedVIConfig,
    structure: Structure,
    problem: Problem,
    state: FactoredState,
    evaluation: Evaluation,
    lr: float,
    rngs: Rngs,
) -> tuple[FactoredState, Info]:
    count, temperature = int(state.step[0]) + 1, config.temperature  # all chains have done the same updates
    mean, scale, factors = state.iterate[:, 0], state.iterate[:, 1].exp(), state.iterate[:, 2:]
    kappa, noise = _kappa(structure, state)

    def gradient_at(number: int, grad_log_lik: Tensor) -> Tensor:
        pair, sign = place(number)
        point, found = mean + sign * scale * kappa[:, pair], evaluation._replace(grad_log_lik=grad_log_lik)
        return grad_energy(found, point, problem.prior, prior_weight=config.prior_weight)

    gradients = gradients_of(evaluation, config.num_draws)
    of_draws = [gradient_at(number, gradient) for number, gradient in enumerate(gradients)]
    path = temperature * structure.solve(factors, kappa)
    c, slope = _slope(config, state, scale[:, None] * parts(of_draws, torch.zeros_like(kappa))[1], path)
    even, odd = parts(of_draws, c[:, :, None] * path / scale[:, None])
    rest = scale[:, None] * odd
    log_scale = over_pairs(rest * kappa) / temperature - (1 - c)
    of_free_energy = torch.cat(
        [
            even[:, None] / problem.num_data,
            _of_random(structure, log_scale)[:, None],
            structure.free(noise.mT @ rest / (temperature * noise.shape[1]))
            - (1 - c)[:, :, None] * structure.entropy_gradient(factors),
        ],
        1,
    )
    rates = torch.full_like(state.iterate[:1, :, :1], config.std_learning_rate * lr / problem.learning_rate)
    rates[:, 0] = lr
    rates[:, 2:].clamp_(max=structure.largest_step(mean.shape[1]))
    first, second, divisor = direction(config.optimizer, config.momentum)(
        of_free_energy, state.first, state.second, count
    )
    iterate, weight = state.iterate - rates * first / divisor, averaging_weight(problem, count)
    theta = state.theta.lerp(iterate[:, 0], weight)
    moments = state.moments.lerp(structure.moments(iterate[:, 1].exp(), iterate[:, 2:]), weight)
    drawn = energy(evaluation, mean + scale * kappa[:, 0], problem.prior, prior_weight=config.prior_weight)
    half_log_det = _of_random(structure, state.iterate[:, 1]).sum(1) + structure.half_log_det(factors)
    dim = theta.shape[1] if structure.is_random is None else int(structure.is_random.sum())
    free_energy = drawn - temperature * gaussian_entropy(half_log_det, dim)
    new = FactoredState(theta, moments, iterate, first, second, slope, state.noise, state.step + 1)
    return new, {"free_energy": free_energy, "std": (half_log_det / dim).exp()}


def _of_random(structure: Structure, values: Tensor) -> Tensor:
    """Return values [..., d] with 0 in the elements of points."""
    return values if structure.is_random is None else values * structure.is_random.to(values)


def _slope(config: ReparametrisedVIConfig, state: FactoredState, odd: Tensor, path: Tensor) -> tuple[Tensor, Tensor]:
    """Return c [M, 1] from earlier draws, and the running products with these draws.

    Args:
        odd: the odd parts [M, P, d] of D grad U.
        path: T A^-1 kappa, likewise.
    """
    slope = state.slope
    if config.estimator == "stick_the_landing":
        return torch.ones_like(slope[:, :1]), slope
    products = over_pairs(torch.stack([(odd * path).sum(2), path.square().sum(2)], 2))
    c = (slope[:, :1] / slope[:, 1:].clamp_min(torch.finfo(slope.dtype).tiny)).clamp(0, 1)
    return c, slope.lerp(products, SLOPE_RATE)


def _kappa(structure: Structure, state: FactoredState) -> tuple[Tensor, Tensor]:
    """Return kappa [M, P, d] of the last draws, and the noise [M, P, r] that the factors multiply."""
    eps, noise = structure.split(state.noise, state.theta.shape[1])
    return eps + noise @ state.iterate[:, 2:], noise


def _draw(structure: Structure, state: FactoredState, pair: int, sign: int) -> Tensor:
    """Return mean + sign D kappa [M, d] of a pair at the last iterate."""
    kappa = _kappa(structure, state._replace(noise=state.noise[:, pair : pair + 1]))[0][:, 0]
    return state.iterate[:, 0] + sign * state.iterate[:, 1].exp() * kappa
