"""The stationary law of a rule on a Gaussian, solved from one update of the rule, and runs to compare with it."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hf_bayes.chains.sampling import SampleResult, sample
from hf_bayes.core.config import MethodConfig
from hf_bayes.core.rng import generator
from hf_bayes.core.types import Evaluation, Problem, Rule
from hf_bayes.distributions.energy import FlatPrior, GaussianPrior


class Moments(NamedTuple):
    """Stationary second moments; ``momentum`` is 0 for a rule without one."""

    position: float
    momentum: float
    cross: float


def stationary_moments(
    config: MethodConfig, *, step_size: float, curvature: float, gradient_variance: float = 0.0, **held: float
) -> Moments:
    """Return E theta^2, E m^2 and E theta m between updates, for U = curvature theta^2 / 2 at h = ``step_size``.

    One update is an affine map (theta, m) -> A (theta, m) + b R + g (noise in the gradient). A, b and g follow from
    calls of the rule, and S = A S A' + b b' + V g g' is solved.

    Args:
        held: fields of the state that keep a fixed value, such as ``friction``.
    """
    problem = Problem(7, FlatPrior(), learning_rate=7 * step_size**2, num_steps=1, burn_in=0, shapes={"": (1,)})
    rule = config.build(problem)
    assert isinstance(rule, Rule)

    def move(theta: float, momentum: float, gradient: float) -> Tensor:
        """Return the state after a later update, with the noise R of one seed."""
        state = rule.init(torch.tensor([[theta]], dtype=torch.float64), [generator(0)])
        fields = {name: torch.full_like(getattr(state, name), value) for name, value in held.items()}
        state = state._replace(step=state.step + 1, **fields)
        if hasattr(state, "momentum"):
            state = state._replace(momentum=torch.tensor([[momentum]], dtype=torch.float64))
        evaluation = Evaluation(torch.zeros(1), -curvature * state.theta - gradient)
        state, _ = rule.update(state, evaluation, problem.learning_rate, [generator(1)])
        return torch.cat([state.theta[0], getattr(state, "momentum", torch.zeros(1, 1))[0]])

    unit = torch.randn(1, generator=generator(1), dtype=torch.float64)
    origin = move(0.0, 0.0, 0.0)
    matrix = torch.stack([move(1.0, 0.0, 0.0) - origin, move(0.0, 1.0, 0.0) - origin], dim=1)
    kick, noise = move(0.0, 0.0, 1.0) - origin, origin / unit
    assert torch.linalg.eigvals(matrix).abs().max() < 1, "unstable"
    covariance = lyapunov(matrix, torch.outer(noise, noise) + gradient_variance * torch.outer(kick, kick))
    return Moments(covariance[0, 0].item(), covariance[1, 1].item(), covariance[0, 1].item())


def lyapunov(matrix: Tensor, noise: Tensor) -> Tensor:
    """Return the S [k, k] with S = A S A' + Q."""
    size = len(matrix)
    system = torch.eye(size**2, dtype=torch.float64) - torch.kron(matrix, matrix)
    return torch.linalg.solve(system, noise.flatten()).view(size, size)


def flat_bottom(theta: Tensor) -> Tensor:
    """Return U'(theta) for U = theta^2 / 2 + cos(theta), which is quartic at its minimum and quadratic far away."""
    return theta - theta.sin()


def stationary_square(
    config: MethodConfig, *, step_size: float, num_position: int = 32, num_momentum: int = 16
) -> float:
    """Return E theta^2 of the chain on ``flat_bottom`` at h = ``step_size``, without random numbers.

    The moments e_k = E phi_k of Hermite polynomials phi_k(theta / 1.3, m) solve e_k = sum_j P_kj e_j, where the mean of
    phi_k after an update (with its noise integrated) is projected onto them by quadrature.
    """
    problem = Problem(1, FlatPrior(), learning_rate=step_size**2, num_steps=1, burn_in=0, shapes={"": (1,)})
    rule = config.build(problem)
    assert isinstance(rule, Rule)
    (thetas, theta_weights), (momenta, momentum_weights) = _gauss(num_position), _gauss(num_momentum)
    theta, momentum = (axis.flatten() for axis in torch.meshgrid(1.3 * thetas, momenta, indexing="ij"))
    weights = torch.outer(theta_weights, momentum_weights).flatten()

    def move(theta: Tensor, momentum: Tensor) -> tuple[Tensor, Tensor]:
        state = rule.init(theta[None], [generator(0)])
        state = state._replace(step=state.step + 1)
        if hasattr(state, "momentum"):
            state = state._replace(momentum=momentum[None])
        evaluation = Evaluation(torch.zeros(1), -flat_bottom(state.theta))
        state, _ = rule.update(state, evaluation, problem.learning_rate, [generator(1)])
        return state.theta[0], getattr(state, "momentum", torch.zeros_like(theta)[None])[0]

    def basis(theta: Tensor, momentum: Tensor) -> Tensor:
        products = _hermite(theta / 1.3, num_position)[:, :, None] * _hermite(momentum, num_momentum)[:, None]
        return products.flatten(1)

    unit = torch.randn(len(theta), generator=generator(1), dtype=torch.float64)
    noise = [(kick / unit)[0] for kick in move(torch.zeros_like(theta), torch.zeros_like(theta))]
    still = [moved - kick * unit for moved, kick in zip(move(theta, momentum), noise, strict=True)]
    after = sum(w * basis(still[0] + noise[0] * r, still[1] + noise[1] * r) for r, w in zip(*_gauss(12), strict=True))
    projected = (basis(theta, momentum) * weights[:, None]).T @ after
    system = projected.T - torch.eye(len(projected), dtype=torch.float64)
    expectations = torch.linalg.solve(system[1:, 1:], -system[1:, 0])  # the first polynomial is 1
    second = expectations[2 * num_momentum - 1]  # of (theta^2 / 1.69 - 1) / sqrt(2)
    return 1.69 * (math.sqrt(2) * second.item() + 1)


def exact_square() -> float:
    """Return E theta^2 of exp(-U) for ``flat_bottom``."""
    theta = torch.linspace(-10, 10, 20_001, dtype=torch.float64)
    density = torch.exp(-theta.square() / 2 - theta.cos())
    return ((theta.square() * density).sum() / density.sum()).item()


def _gauss(count: int) -> tuple[Tensor, Tensor]:
    """Return nodes and weights for the mean over a standard normal."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(count)
    return torch.from_numpy(nodes), torch.from_numpy(weights / weights.sum())


def _hermite(x: Tensor, count: int) -> Tensor:
    """Return the first orthonormal polynomials of a standard normal, [n, count]."""
    columns = [torch.ones_like(x), x]
    for k in range(1, count - 1):
        columns.append((x * columns[k] - math.sqrt(k) * columns[k - 1]) / math.sqrt(k + 1))
    return torch.stack(columns, 1)


def distance_from_sgd(
    config: MethodConfig, rates: Sequence[float], *, momentum: float = 0.0, factor: float = 1.0
) -> float:
    """Return the largest |theta - weights| between a run at T = 0 and ``torch.optim.SGD``, on a tanh regression.

    Args:
        rates: l_t of each update.
        momentum: SGD's momentum.
        factor: factor of l_t in SGD.
    """
    num_data, std = 50, 0.8
    inputs = torch.randn(num_data, 6, generator=generator("x"), dtype=torch.float64)
    targets = torch.randn(num_data, generator=generator("y"), dtype=torch.float64)
    start = torch.randn(1, 6, generator=generator("theta"), dtype=torch.float64)
    prior = GaussianPrior(torch.zeros((), dtype=torch.float64), torch.tensor(std, dtype=torch.float64))
    rule = config.build(Problem(num_data, prior, max(rates), num_steps=len(rates), burn_in=0, shapes={"": (6,)}))
    assert isinstance(rule, Rule)
    rngs, distance = [generator(0)], 0.0
    state = rule.init(start.clone(), rngs)
    weights = start[0].clone().requires_grad_()
    sgd = torch.optim.SGD([weights], lr=rates[0], momentum=momentum, weight_decay=1 / (num_data * std**2))
    for rate in rates:
        sgd.param_groups[0]["lr"] = factor * rate
        sgd.zero_grad()
        (torch.tanh(inputs @ weights) - targets).square().mean().backward()
        sgd.step()
        leaf = state.theta.clone().requires_grad_()
        log_lik = -(torch.tanh(inputs @ leaf[0]) - targets).square().sum()[None]
        (gradient,) = torch.autograd.grad(log_lik.sum(), leaf)
        state, _ = rule.update(state, Evaluation(log_lik.detach(), gradient), rate, rngs)
        distance = max(distance, float((state.theta[0] - weights.detach()).abs().max()))
    return distance


N, LEARNING_RATE = 10, 0.1
"""The Gaussian of the runs: U = N |theta|^2 / 2, h^2 lambda = 0.1."""


@functools.cache
def run(config: MethodConfig, gradient_variance: float = 0.0, num_steps: int = 1500) -> SampleResult:
    """Return a run of 4 chains of 256 independent coordinates on the Gaussian, with noise in the gradient of U."""
    noise = generator("gradient")

    def gaussian(theta: Tensor, batch: Any) -> Tensor:
        value = 0.5 * N * theta.square().sum(1)
        if gradient_variance:
            value = value + math.sqrt(gradient_variance) * (torch.randn(theta.shape, generator=noise) * theta).sum(1)
        return value

    start = torch.randn(4, 256, generator=generator("start")) * math.sqrt(config.temperature / N)
    return sample(
        gaussian, start, config, num_steps=num_steps, learning_rate=LEARNING_RATE, num_data=N, burn_in=200, seed=1
    )


def variance_error(draws: Tensor, law: float) -> tuple[float, float]:
    """Return the relative error of the pooled second moment of draws [M, S, d], and its standard error.

    Coordinates are independent with one law, so the spread of their means gives the standard error.
    """
    means = draws.square().mean(1).flatten()
    return abs(means.mean().item() / law - 1), means.std().item() / math.sqrt(len(means)) / law
