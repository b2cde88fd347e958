from __future__ import annotations

import math

import pytest
import torch

from hf_bayes.core.rng import generator
from hf_bayes.core.types import Evaluation, Problem, Rule
from hf_bayes.distributions.energy import FlatPrior
from hf_bayes.methods.sgmcmc.baoab import BAOABConfig
from tests.methods.sgmcmc.laws import distance_from_sgd, run, stationary_moments


def test_both_schemes_give_the_same_positions_half_a_kick_apart() -> None:
    problem = Problem(10, FlatPrior(), 0.1, num_steps=1, burn_in=0, shapes={"": (5,)})
    theta = torch.randn(2, 5, generator=generator("start"), dtype=torch.float64)
    ends = []
    for scheme in ("baoab", "baoa"):
        rule = BAOABConfig(scheme=scheme).build(problem)  # type: ignore[arg-type]
        state = rule.init(theta, [generator("init", chain) for chain in range(2)])
        rngs = [generator("noise", chain) for chain in range(2)]
        if scheme == "baoa":  # the half kick with grad U = 10 sin(theta) that this scheme would give too much
            state = state._replace(momentum=state.momentum + 0.5 * 0.1 * 10 * theta.sin())
        for _ in range(20):
            state, _ = rule.update(state, Evaluation(torch.zeros(2), -10 * state.theta.sin()), 0.1, rngs)
        ends.append(state.theta)
    assert (ends[0] - ends[1]).abs().max() < 1e-13


@pytest.mark.parametrize("step_size", [0.1, 1.0, 1.9])
@pytest.mark.statistics
def test_momentum_between_half_kicks_has_the_documented_variance(step_size: float) -> None:
    curvature, temperature = 0.9, 0.7
    config = BAOABConfig(momentum=0.6, temperature=temperature)
    position, momentum, cross = stationary_moments(config, step_size=step_size, curvature=curvature)
    half = step_size * curvature / 2
    between = momentum - 2 * half * cross + half**2 * position
    assert between == pytest.approx(temperature * (1 - step_size**2 * curvature / 4), rel=1e-9)


@pytest.mark.parametrize(("scheme", "law"), [("baoab", 1 - 0.1 / 4), ("baoa", 1.0)])
@pytest.mark.statistics
def test_kinetic_temperature_is_that_of_its_scheme(scheme: str, law: float) -> None:
    info = run(BAOABConfig(momentum=0.8, scheme=scheme)).info  # type: ignore[arg-type]
    # 4 standard errors of 1024 coordinates x 1300 updates, correlated over 10: 4 * sqrt(2 / 130 000) = 0.016
    assert info["kinetic_temperature"][200:].mean() == pytest.approx(law, abs=0.012)


def test_zero_temperature_is_torch_sgd_at_a_lower_learning_rate() -> None:
    config = BAOABConfig(temperature=0.0, momentum=0.7, scheme="baoa")
    assert distance_from_sgd(config, [0.05] * 100, momentum=0.7, factor=(1 + 0.7) / 2) < 1e-12
    assert distance_from_sgd(config, [0.05] * 100, momentum=0.7) > 1e-3  # the broken twin: the same learning rate


def test_without_momentum_it_is_the_limit_of_high_friction() -> None:
    """Theta moves by -(h^2 / 2) grad U + (h / 2) sqrt(T) (R_{t-1} + R_t) at momentum 0, as in docs/add_a_method.md."""
    rule = BAOABConfig(momentum=0.0, temperature=2.0).build(Problem(1, FlatPrior(), 0.1, 1, 0, {"": (3,)}))
    assert isinstance(rule, Rule)
    state = rule.init(torch.zeros(1, 3, dtype=torch.float64), [generator("init")])._replace(step=torch.ones(1))
    before, theta = state.momentum / math.sqrt(2), torch.ones(1, 3, dtype=torch.float64)
    state, _ = rule.update(state._replace(theta=theta), Evaluation(torch.zeros(1), -theta), 0.1, [generator("R")])
    noise = torch.randn(3, generator=generator("R"), dtype=torch.float64)
    expected = theta - 0.05 * theta + math.sqrt(0.1) / 2 * math.sqrt(2) * (before + noise)
    assert (state.theta - expected).abs().max() < 1e-14


def test_friction_stays_fixed_under_a_schedule() -> None:
    """Half the step keeps the square root of beta, since c = exp(-gamma h)."""
    rule = BAOABConfig(momentum=0.81, temperature=0.0).build(Problem(1, FlatPrior(), 0.4, 1, 0, {"": (1,)}))
    assert isinstance(rule, Rule)
    state = rule.init(torch.zeros(1, 1), [generator(0)])._replace(momentum=torch.ones(1, 1))
    for rate, kept in ((0.4, 0.81), (0.1, 0.9)):
        moved, _ = rule.update(state, Evaluation(torch.zeros(1), torch.zeros(1, 1)), rate, [generator(0)])
        assert moved.momentum.item() == pytest.approx(kept)


@pytest.mark.parametrize("field", [{"momentum": 1.0}, {"momentum": -0.1}, {"scheme": "obabo"}])
def test_other_values_are_refused(field: dict[str, object]) -> None:
    (name,) = field
    with pytest.raises(ValueError, match=f"baoab: {name} must be"):
        BAOABConfig(**field)  # type: ignore[arg-type]
