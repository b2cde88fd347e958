from __future__ import annotations

import math

import pytest
import torch

from hf_bayes.core.rng import generator
from hf_bayes.core.types import Evaluation, Problem, Rule
from hf_bayes.distributions.energy import FlatPrior
from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from hf_bayes.methods.sgmcmc.sgnht import SGNHTConfig
from tests.methods.sgmcmc.laws import LEARNING_RATE, N, run


@pytest.mark.parametrize("order", ["symplectic", "euler"])
@pytest.mark.parametrize("variance", [0.0, 10.0, 30.0])
@pytest.mark.statistics
def test_friction_adapts_to_unknown_gradient_noise(order: str, variance: float) -> None:
    config = SGNHTConfig(momentum=0.8, thermostat_steps=5, order=order)  # type: ignore[arg-type]
    info = run(config, variance).info
    kinetic = info["kinetic_temperature"][200:].mean()
    assert kinetic == pytest.approx(1, abs=0.005)  # the thermostat leaves only its own end points' difference over time
    x, noise = LEARNING_RATE, LEARNING_RATE / N * variance
    half, last = (1 - x / 4, 0.4 + noise) if order == "symplectic" else (1 + 0.75 * x, 0.4 + noise + 2 * x + x**2 / 2)
    ratio = (half - math.sqrt(half**2 - last)) / 0.2
    assert info["friction_ratio"][200:].mean() == pytest.approx(ratio, rel=0.01)


@pytest.mark.statistics
def test_the_check_catches_a_friction_that_stands_still() -> None:
    kinetic = run(SGHMCConfig(momentum=0.8), 30.0).info["kinetic_temperature"][200:].mean()
    assert kinetic > 1.5


def test_the_euler_order_matches_the_posteriors_package() -> None:
    epsilon, alpha, sigma, num_data = 0.3, 0.4, 1.2, 7
    temperature = 1 / num_data  # the Bayes posterior in posteriors' units
    scale = math.sqrt(num_data) / sigma  # our momentum over theirs
    rate, step_size = (epsilon / sigma) ** 2, epsilon / (sigma * math.sqrt(num_data))
    config = SGNHTConfig(
        momentum=1 - epsilon * alpha / sigma**2, order="euler", thermostat_steps=1 / (step_size * math.sqrt(2))
    )
    rule = config.build(Problem(num_data, FlatPrior(), rate, num_steps=1, burn_in=0, shapes={"": (5,)}))
    assert isinstance(rule, Rule)
    state = rule.init(torch.randn(1, 5, generator=generator("theta"), dtype=torch.float64), [generator("m")])
    theta, m, xi = state.theta[0], state.momentum[0] / scale, torch.tensor(alpha, dtype=torch.float64)
    rngs, noise = [generator("noise")], generator("noise")
    for _ in range(10):
        state, _ = rule.update(state, Evaluation(torch.zeros(1), -num_data * state.theta.sin()), rate, rngs)
        zeta = torch.randn(5, generator=noise, dtype=torch.float64)
        theta, m, xi = (
            theta + epsilon / sigma**2 * m,
            m
            - epsilon * theta.sin()
            - epsilon / sigma**2 * xi * m
            + math.sqrt(2 * epsilon * temperature * alpha) * zeta,
            xi + epsilon * (m @ m / (sigma**2 * 5) - temperature),
        )
        assert (state.theta[0] - theta).abs().max() < 1e-12
        assert (state.momentum[0] - scale * m).abs().max() < 1e-12
        assert (state.friction[0] - scale * xi).abs() < 1e-12


def test_a_thermostat_returns_to_balance_without_swinging() -> None:
    config = SGNHTConfig(momentum=0.9, thermostat_steps=10)
    rule = config.build(Problem(1, FlatPrior(), 1e-4, num_steps=1, burn_in=0, shapes={"": (2**16,)}))
    assert isinstance(rule, Rule)
    rngs = [generator("chain")]
    state = rule.init(torch.zeros(1, 2**16), rngs)
    state = state._replace(momentum=2 * state.momentum)  # four times too hot
    kinetic = []
    for _ in range(150):
        state, info = rule.update(state, Evaluation(torch.zeros(1), torch.zeros_like(state.theta)), 1e-4, rngs)
        kinetic.append(info["kinetic_temperature"].item())
    assert kinetic[0] > 3
    assert kinetic[-1] == pytest.approx(1, abs=0.03)
    assert min(kinetic) > 0.5


@pytest.mark.parametrize(
    "field", [{"momentum": 0.5}, {"momentum": 1.0}, {"thermostat_steps": 0.0}, {"order": "leapfrog"}]
)
def test_other_values_are_refused(field: dict[str, object]) -> None:
    (name,) = field
    with pytest.raises(ValueError, match=f"sgnht: {name} must be"):
        SGNHTConfig(**field)  # type: ignore[arg-type]
