"""The distributions of ``agps_probe``: ten dimensions, a density, and a known number of modes."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributions import MultivariateNormal


class Law(NamedTuple):
    """A distribution in ten dimensions with a known number of modes.

    Attributes:
        energy: U [M] of theta [M, 10], up to a constant.
        draw: a function that makes independent draws with a generator.
        modes: the number of modes.
    """

    energy: Callable[[Tensor], Tensor]
    draw: Callable[[int, torch.Generator], Tensor]
    modes: int


DIM, BEND, EQUAL = 10, 0.1, 0.95


def _normals(count: int, rng: torch.Generator) -> Tensor:
    return torch.randn(count, DIM, dtype=torch.float64, generator=rng)


def _correlated() -> Law:
    """Return a Gaussian whose coordinates all have correlation 0.95."""
    covariance = torch.full((DIM, DIM), EQUAL, dtype=torch.float64).fill_diagonal_(1.0)
    density = MultivariateNormal(torch.zeros(DIM, dtype=torch.float64), covariance)

    def draw(count: int, rng: torch.Generator) -> Tensor:
        return _normals(count, rng) @ density.scale_tril.T

    return Law(lambda theta: -density.log_prob(theta), draw, 1)


def _bent() -> Law:
    """Return theta_1 ~ N(0, 1), theta_2 ~ N(theta_1^2, 0.1^2), all others N(0, 1): one mode, along a parabola."""

    def energy(theta: Tensor) -> Tensor:
        off = (theta[:, 1] - theta[:, 0].square()) / BEND
        return 0.5 * (theta.square().sum(1) - theta[:, 1].square() + off.square())

    def draw(count: int, rng: torch.Generator) -> Tensor:
        theta = _normals(count, rng)
        theta[:, 1] = theta[:, 0].square() + BEND * theta[:, 1]
        return theta

    return Law(energy, draw, 1)


def _two(distance: float) -> Law:
    """Return an equal mixture of N(-distance / 2, 1) and N(distance / 2, 1) in theta_1, all others N(0, 1)."""

    def energy(theta: Tensor) -> Tensor:
        first = torch.stack([-0.5 * (theta[:, 0] - at).square() for at in (-distance / 2, distance / 2)])
        return 0.5 * theta[:, 1:].square().sum(1) - first.logsumexp(0)

    def draw(count: int, rng: torch.Generator) -> Tensor:
        theta = _normals(count, rng)
        side = torch.randint(2, (count,), generator=rng)
        theta[:, 0] += distance * (side - 0.5)
        return theta

    return Law(energy, draw, 2)


LAWS = {
    "independent normals": Law(lambda theta: 0.5 * theta.square().sum(1), _normals, 1),
    "correlated normals": _correlated(),
    "bent": _bent(),
    "two normals, 5 apart": _two(5.0),
    "two normals, 10 apart": _two(10.0),
}
