"""Every sampler with one gradient per update against the law of its discretisation."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_bayes.chains.sampling import sample
from hf_bayes.core.config import MethodConfig
from hf_bayes.core.rng import generator
from hf_bayes.core.schedules import Cyclical
from hf_bayes.core.types import Problem, Rule
from hf_bayes.distributions.energy import FlatPrior
from hf_bayes.methods.sgmcmc.baoab import BAOABConfig
from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from hf_bayes.methods.sgmcmc.sghmc_euler import SGHMCEulerConfig
from hf_bayes.methods.sgmcmc.sgld import SGLDConfig
from hf_bayes.methods.sgmcmc.sgnht import SGNHTConfig
from tests.methods.sgmcmc.laws import (
    LEARNING_RATE,
    Moments,
    N,
    exact_square,
    run,
    stationary_moments,
    stationary_square,
    variance_error,
)

T, V = 0.6, 20.0
"""The settings of the runs: T differs from T^2, and the gradient noise is about as strong as the injected noise."""

BETA, H_SQUARED = 0.8, LEARNING_RATE / N


@dataclass(frozen=True)
class Law:
    """A sampler and the law in its docstring, on the Gaussian.

    Attributes:
        config: (beta, T) -> the config.
        docstring: (b, x, T, h^2 V) -> lambda E theta^2 and E m^2.
        order: order in h of the bias of E theta^2 and of E m^2, where there is one.
    """

    config: Callable[[float, float], MethodConfig]
    docstring: Callable[[float, float, float, float], tuple[float, float]]
    order: tuple[int | None, int | None]


def sghmc(b: float, x: float, temperature: float, noise: float) -> tuple[float, float]:
    hot = temperature + noise / (2 * (1 - b))
    return hot / (1 - x / (2 * (1 + b))), 2 * hot / (1 + b - x / 2)


def sghmc_euler(b: float, x: float, temperature: float, noise: float) -> tuple[float, float]:
    hot = temperature + noise / (2 * (1 - b))
    below = (1 - b - x) * (1 + b + x / 2)
    return hot * (1 - b) * (1 + b + x) / below, 2 * hot * (1 - b) / below


def sgld(b: float, x: float, temperature: float, noise: float) -> tuple[float, float]:
    return (temperature + noise / 2) / (1 - x / 2), 0.0


def baoab(b: float, x: float, temperature: float, noise: float) -> tuple[float, float]:
    heat = noise / ((1 - b) * (4 - x))
    return temperature + heat * (1 + b), temperature + 4 * heat * b**2 / (1 + b)


def friction(b: float, x: float, temperature: float, noise: float, *, euler: bool = False) -> float:
    """Return a = h xi of sgnht."""
    c = 2 * (1 - b) + noise / temperature
    half, last = (1 + 0.75 * x, c + 2 * x + x**2 / 2) if euler else (1 - x / 4, c)
    return half - math.sqrt(half**2 - last)


def sgnht(b: float, x: float, temperature: float, noise: float) -> tuple[float, float]:
    return temperature * (1 - friction(b, x, temperature, noise) / 2), temperature


def sgnht_euler(b: float, x: float, temperature: float, noise: float) -> tuple[float, float]:
    return temperature * (1 - friction(b, x, temperature, noise, euler=True) / 2 + x / 2), temperature


def thermostat(order: Any) -> Callable[[float, float], SGNHTConfig]:
    return lambda b, temperature: SGNHTConfig(momentum=b, temperature=temperature, order=order, thermostat_steps=5)


LAWS = {
    "sghmc": Law(lambda b, t: SGHMCConfig(momentum=b, temperature=t), sghmc, (2, 1)),
    "sgld": Law(lambda b, t: SGLDConfig(temperature=t), sgld, (2, None)),
    "baoab": Law(lambda b, t: BAOABConfig(momentum=b, temperature=t), baoab, (None, None)),
    "baoa": Law(lambda b, t: BAOABConfig(momentum=b, temperature=t, scheme="baoa"), baoab, (None, None)),
    "sgnht": Law(thermostat("symplectic"), sgnht, (1, None)),
    "sgnht_euler": Law(thermostat("euler"), sgnht_euler, (1, None)),
    "sghmc_euler": Law(lambda b, t: SGHMCEulerConfig(momentum=b, temperature=t), sghmc_euler, (1, 1)),
}
each = pytest.mark.parametrize("name", LAWS)


def solved(name: str, b: float, step_size: float, curvature: float, temperature: float, variance: float) -> Moments:
    """Return the law that one update of the sampler implies; a thermostat's friction is fixed at its balance."""
    held = {}
    if name.startswith("sgnht"):
        x, noise = step_size**2 * curvature, step_size**2 * variance
        held = {"friction": friction(b, x, temperature, noise, euler=name.endswith("euler")) / step_size}
    return stationary_moments(
        LAWS[name].config(b, temperature),
        step_size=step_size,
        curvature=curvature,
        gradient_variance=variance,
        **held,
    )


@each
@pytest.mark.parametrize("variance", [0.0, 1.5])
@pytest.mark.parametrize("step_size", [0.02, 0.3])
@pytest.mark.statistics
def test_stationary_moments_are_those_of_the_docstring(name: str, step_size: float, variance: float) -> None:
    curvature, b = 1.7, 0.75
    expected = LAWS[name].docstring(b, step_size**2 * curvature, 0.7, step_size**2 * variance)
    got = solved(name, b, step_size, curvature, 0.7, variance)
    assert (curvature * got.position, got.momentum) == pytest.approx(expected, rel=1e-9)


@each
@pytest.mark.statistics
def test_bias_falls_with_the_order_that_is_declared(name: str) -> None:
    def bias(step_size: float) -> tuple[float, float]:
        got = solved(name, 1 - step_size, step_size, 1.0, 1.0, 0.0)
        return got.position - 1, got.momentum - 1

    for coarse, fine, order in zip(bias(0.02), bias(0.01), LAWS[name].order, strict=True):
        if order is None:
            assert abs(coarse) < 1e-9 or coarse == -1  # no momentum
        else:
            # the next order of the expansion is a share h of the leading one
            assert math.log2(coarse / fine) == pytest.approx(order, abs=0.05)


@pytest.mark.parametrize(("name", "order"), [("sghmc", 2), ("sgld", 2), ("baoab", 2), ("sghmc_euler", 1)])
@pytest.mark.statistics
def test_bias_on_a_non_gaussian_target_has_the_stated_order(name: str, order: int) -> None:
    """The order holds for positions. The momenta of sghmc have order 1, above."""

    def bias(step_size: float) -> float:
        beta = math.exp(-step_size) if name == "baoab" else 1 - step_size
        return stationary_square(LAWS[name].config(beta, 1.0), step_size=step_size) - exact_square()

    # the next order of the expansion: 24 % of the leading one for sghmc_euler at h = 0.2, a few per cent for the others
    assert math.log2(bias(0.2) / bias(0.1)) == pytest.approx(order, abs=0.3)


def check(name: str, draws: Tensor, variance: float) -> None:
    """The tolerance of 3 % is 4 standard errors at 36 000 independent draws."""
    expected, _ = LAWS[name].docstring(BETA, H_SQUARED * N, T, H_SQUARED * variance)
    error, standard_error = variance_error(draws, expected / N)
    assert 4 * standard_error < 0.03
    assert error < 0.03


@each
@pytest.mark.parametrize("variance", [0.0, V])
@pytest.mark.statistics
def test_variance_of_a_run_is_the_discretisations(name: str, variance: float) -> None:
    check(name, run(LAWS[name].config(BETA, T), variance).draws, variance)


@each
@pytest.mark.statistics
def test_the_check_catches_wrong_temperatures(name: str) -> None:
    expected, _ = LAWS[name].docstring(BETA, H_SQUARED * N, T, 0.0)
    twins = {"noise without sqrt(2)": T / 2, "T outside the square root": T**2, "N forgotten in the noise": T * N}
    for twin, temperature in twins.items():
        draws = run(LAWS[name].config(BETA, temperature), num_steps=400).draws
        error, standard_error = variance_error(draws, expected / N)
        assert error > 0.03 + 4 * standard_error, twin


@pytest.mark.parametrize(
    ("name", "twin", "variance"),
    [
        ("sghmc", "sghmc_euler", 0.0),  # the old momentum in place of the new one
        ("sghmc_euler", "sghmc", 0.0),  # the new one in place of the old
        ("baoab", "sghmc", V),
        ("sgnht", "sghmc", 0.0),  # a friction that stands still
        ("sgnht", "sghmc", V),
    ],
)
@pytest.mark.statistics
def test_the_check_catches_the_law_of_a_similar_sampler(name: str, twin: str, variance: float) -> None:
    draws = run(LAWS[twin].config(BETA, T), variance).draws
    check(twin, draws, variance)
    with pytest.raises(AssertionError):
        check(name, draws, variance)


@each
@pytest.mark.statistics
def test_the_check_catches_minibatch_noise_that_is_forgotten(name: str) -> None:
    with pytest.raises(AssertionError):
        check(name, run(LAWS[name].config(BETA, T), V).draws, 0.0)


CYCLE, RAMPED = range(40, 161, 40), Cyclical(ramp_up=0.5)
"""A run of four cycles of 40 updates; the temperature rises for 20 of them, and the law is far from stationary."""

PEAK = math.sqrt(H_SQUARED)


def sgld_update(h: float, x: float) -> tuple[list[list[float]], list[float]]:
    return [[1 - x, 0], [0, 0]], [h * math.sqrt(2), 0]


def sghmc_update(h: float, x: float) -> tuple[list[list[float]], list[float]]:
    b = 1 - (1 - BETA) * h / PEAK
    noise = math.sqrt(2 * (1 - b))
    return [[1 - x, h * b], [-x / h, b]], [h * noise, noise]


def sghmc_euler_update(h: float, x: float) -> tuple[list[list[float]], list[float]]:
    b = 1 - (1 - BETA) * h / PEAK
    return [[1, h], [-x / h, b]], [0, math.sqrt(2 * (1 - b))]


def baoa_update(h: float, x: float) -> tuple[list[list[float]], list[float]]:
    c = BETA ** (h / PEAK)
    noise = math.sqrt(1 - c**2)
    return [[1 - x * (1 + c) / 2, h * (1 + c) / 2], [-c * x / h, c]], [h / 2 * noise, noise]


UPDATES = {"sgld": sgld_update, "sghmc": sghmc_update, "sghmc_euler": sghmc_euler_update, "baoa": baoa_update}
"""The maps (h_t, x = h_t^2 lambda) -> A and g of the docstrings: (theta, m) becomes A (theta, m) + sqrt(T_t) g R."""


def squares_at_the_draws(name: str, schedule: Cyclical) -> Tensor:
    """Return E theta^2 [4] at the end of each cycle, from the origin, by the recursion of second moments."""
    second, found = torch.zeros(2, 2, dtype=torch.float64), []
    for step in range(CYCLE[-1]):
        h = PEAK * math.sqrt(schedule.learning_rate(step, CYCLE))
        matrix, noise = (torch.tensor(part, dtype=torch.float64) for part in UPDATES[name](h, h**2 * N))
        second = matrix @ second @ matrix.T + T * schedule.temperature(step, CYCLE) * torch.outer(noise, noise)
        if step + 1 in CYCLE:
            found.append(second[0, 0])
    return torch.stack(found)


def cyclical_errors(name: str, schedule: Cyclical, law: Tensor) -> tuple[Tensor, float]:
    """Return the relative errors [4] of the second moments of 40 000 coordinates, and their standard errors."""
    draws = sample(
        lambda theta, batch: 0.5 * N * theta.square().sum(1),
        torch.zeros(4, 10_000),
        dataclasses.replace(LAWS[name].config(BETA, T), schedule=schedule),
        num_steps=CYCLE[-1],
        learning_rate=LEARNING_RATE,
        num_data=N,
        thin=CYCLE.step,
        seed=2,
    ).draws
    return draws.double().square().mean((0, 2)) / law - 1, math.sqrt(2 / 40_000)


@pytest.mark.parametrize("name", UPDATES)
@pytest.mark.statistics
def test_ramped_draws_have_the_variance_of_the_moment_recursion(name: str) -> None:
    law = squares_at_the_draws(name, RAMPED)
    errors, standard_error = cyclical_errors(name, RAMPED, law)
    assert 4 * standard_error < 0.03
    assert errors.abs().max() < 0.03
    # the broken twins: T from the beginning of a cycle on, and a ramp of another length
    for twin in (Cyclical(), Cyclical(ramp_up=0.4)):
        assert cyclical_errors(name, twin, law)[0].abs().max() > 0.03 + 4 * standard_error


@each
def test_momenta_start_at_their_stationary_law(name: str) -> None:
    config = LAWS[name].config(BETA, T)
    rule = config.build(Problem(N, FlatPrior(), LEARNING_RATE, num_steps=1, burn_in=0, shapes={"": (4096,)}))
    assert isinstance(rule, Rule)
    state = rule.init(torch.zeros(4, 4096), [generator("momenta", chain) for chain in range(4)])
    if hasattr(state, "momentum"):
        # 4 standard errors of 16 384 squares: 4 * sqrt(2 / 16 384) = 0.044; Algorithm 1's N(0, I) is caught at T = 0.6
        assert state.momentum.square().mean() == pytest.approx(T, rel=0.044)
