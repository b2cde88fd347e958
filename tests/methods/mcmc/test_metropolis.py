from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_bayes.chains.sampling import sample
from hf_bayes.methods.mcmc import metropolis
from hf_bayes.methods.mcmc.metropolis import MetropolisConfig
from tests.methods.mcmc import targets
from tests.methods.mcmc.targets import (
    ALL_TARGETS,
    TARGETS,
    assert_a_long_run_is_exact,
    assert_resume_is_bitwise,
    chain_rngs,
    evaluator,
    gaussian,
    problem,
    starts,
    worst_z,
)

run = functools.partial(targets.run, learning_rate=1.0, num_steps=1500, burn_in=500, num_chains=96)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.statistics
def test_moments_are_exact_at_every_temperature(target: str, temperature: float) -> None:
    z, ess = worst_z(run(MetropolisConfig(temperature=temperature), target).draws, target, temperature)
    assert ess > 1500  # a 10 % error of a standard deviation is then more than 5 standard errors of the second moment
    assert z < 4  # Monte Carlo standard errors; one run in 2600 exceeds it in one of six moments


@pytest.mark.slow
@pytest.mark.parametrize("target", ALL_TARGETS)
def test_moments_are_exact_in_a_long_run(target: str) -> None:
    assert_a_long_run_is_exact(run(MetropolisConfig(), target, num_steps=10_000, num_chains=256).draws, target)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.statistics
def test_the_moment_check_catches_a_wrong_temperature(target: str) -> None:
    z, _ = worst_z(run(MetropolisConfig(temperature=1.25), target).draws, target, 1.0)
    assert z > 4


@pytest.mark.statistics
def test_the_moment_check_catches_a_forgotten_rejection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metropolis, "rand", lambda rngs, like: -torch.ones(len(like), dtype=like.dtype))
    z, _ = worst_z(run(MetropolisConfig(target_acceptance=None), "gaussian").draws, "gaussian", 1.0)
    assert z > 4


@pytest.mark.statistics
def test_the_moment_check_catches_a_stale_energy(monkeypatch: pytest.MonkeyPatch) -> None:
    state_of = metropolis.MetropolisState
    first: dict[str, Tensor] = {}

    def stale(*args: Any, **fields: Any) -> metropolis.MetropolisState:
        state = state_of(*args, **fields)
        return state._replace(energy=first.setdefault("energy", state.energy))

    monkeypatch.setattr(metropolis, "MetropolisState", stale)
    z, _ = worst_z(run(MetropolisConfig(), "gaussian").draws, "gaussian", 1.0)
    assert z > 4


@pytest.mark.parametrize("first_std", [1e-3, 1.0, 1e2])
@pytest.mark.statistics
def test_adaptation_reaches_the_target_and_stops_after_burn_in(first_std: float) -> None:
    result = sample(
        lambda theta, batch: 0.5 * theta.square().sum(1),
        starts(32, dim=10) / 2,
        MetropolisConfig(proposal_std=first_std),
        num_steps=4500,
        learning_rate=1.0,
        burn_in=3000,
    )
    acceptance, step_size = result.info["acceptance"][3000:], result.info["step_size"]
    assert abs(acceptance.mean() - 0.234) < 0.01
    # of one chain: 3 times the scatter of log s after the 1500 updates since the scales (0.01), and of 1500 correlated
    # moves (0.01)
    assert (acceptance.mean(0) - 0.234).abs().max() < 0.05
    assert torch.equal(step_size[3000:], step_size[3000].expand(1500, -1))
    assert (step_size[:3000].diff(dim=0) != 0).all()


def test_the_adaptation_check_catches_no_adaptation() -> None:
    fixed = MetropolisConfig(target_acceptance=None)
    result = sample(
        lambda theta, batch: 0.5 * theta.square().sum(1),
        starts(32, dim=10) / 2,
        fixed,
        num_steps=500,
        learning_rate=0.5,
        burn_in=250,
    )
    assert abs(result.info["acceptance"][250:].mean() - 0.234) > 0.05
    assert (result.info["step_size"] == 0.5).all()


STDS = torch.logspace(-2, 2, 6, dtype=torch.float64)
"""Standard deviations that differ by four powers of ten."""


def stretched(config: MetropolisConfig) -> Tensor:
    """Return the mean squares [6] of draws of N(0, diag(STDS^2)) in units of their exact values."""

    def energy(theta: Tensor, batch: object) -> Tensor:
        return 0.5 * (theta / STDS).square().sum(1)

    start = torch.zeros(64, 6, dtype=torch.float64)
    draws = sample(energy, start, config, num_steps=6000, burn_in=4000).draws
    return (draws / STDS).square().mean((0, 1))


@pytest.mark.statistics
def test_scales_are_learnt_without_a_learning_rate() -> None:
    # 64 chains with 2000 / (3 * 6) independent draws each: a standard error of sqrt(2 / 7100) = 1.7 %; six of them
    assert (stretched(MetropolisConfig()) - 1).abs().max() < 0.1


@pytest.mark.statistics
def test_the_check_of_scales_catches_one_scale_for_all() -> None:
    assert (stretched(MetropolisConfig(adapt_scale=False)) - 1).abs().max() > 0.5


def test_scales_and_step_are_frozen_after_burn_in() -> None:
    kernel, rngs, evaluate = (
        MetropolisConfig().build(problem(num_steps=300, burn_in=200)),
        chain_rngs(3),
        evaluator(gaussian),
    )
    state = kernel.init(starts(3), evaluate, rngs)
    frozen = None
    for done in range(1, 301):
        state, _ = kernel.step(state, evaluate, rngs)
        if done == 200:
            frozen = (state.scale, state.log_std, state.mean, state.squares)
            assert (state.scale != 1).all()
    assert frozen is not None
    assert all(
        torch.equal(*pair) for pair in zip(frozen, (state.scale, state.log_std, state.mean, state.squares), strict=True)
    )


def test_the_proposal_std_is_the_learning_rate_unless_given() -> None:
    for config, expected in ((MetropolisConfig(), 0.3), (MetropolisConfig(proposal_std=0.7), 0.7)):
        result = sample(gaussian, starts(2), config, num_steps=3, learning_rate=0.3)
        assert torch.allclose(result.info["step_size"], torch.tensor(expected, dtype=torch.float64), rtol=1e-15)


@pytest.mark.statistics
def test_a_wall_is_rejected_and_counted() -> None:
    def half_normal(theta: Tensor, batch: object) -> Tensor:  # NaN on one side of the wall at 1, infinite far off
        outside = torch.where(theta[:, 0] > 3, math.inf, math.nan)
        return torch.where(theta[:, 0] > 1, outside, 0.5 * theta[:, 0].square())

    result = sample(
        half_normal, -starts(64, dim=1).abs(), MetropolisConfig(), num_steps=1500, learning_rate=2.0, burn_in=500
    )
    assert result.draws.max() <= 1
    assert result.info["divergent"].sum() > 1000
    assert (result.info["acceptance"][result.info["divergent"] == 1] == 0).all()
    exact = -math.exp(-0.5) / math.sqrt(2 * math.pi) / 0.8413447  # -phi(1) / Phi(1)
    assert abs(result.draws.mean() - exact) < 4 * 0.8 / math.sqrt(
        64 * 1000 / 20
    )  # 4 standard errors at 20 moves a draw


def test_one_energy_is_asked_for_per_update_and_no_gradient() -> None:
    asked: list[bool] = []
    evaluate = evaluator(gaussian)

    def counting(theta: Tensor, *, gradient: bool = True) -> Any:
        asked.append(gradient)
        return evaluate(theta, gradient=gradient)

    kernel, rngs = MetropolisConfig().build(problem()), chain_rngs(3)
    state = kernel.init(starts(3), counting, rngs)
    for _ in range(10):
        state, _ = kernel.step(state, counting, rngs)
        assert torch.equal(state.energy, gaussian(state.theta))
    assert asked == [False] * 11


def test_chains_do_not_depend_on_their_number() -> None:
    many, few = (run(MetropolisConfig(), "banana", num_steps=600, num_chains=m).draws for m in (5, 2))
    assert torch.equal(many[:2], few)


@pytest.mark.parametrize("cut", [1, 17, 29, 30, 31, 40])
def test_resume_is_bitwise_also_during_adaptation(cut: int) -> None:
    assert_resume_is_bitwise(MetropolisConfig(), cut)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": 0.0}, 'no T = 0 limit worth having. Use method="map"'),
        ({"proposal_std": 0.0}, "proposal_std must be a finite number > 0, got 0.0"),
        ({"adapt_scale": 1}, "adapt_scale must be true or false, got 1"),
        ({"target_acceptance": 1.0}, "target_acceptance must be a finite number > 0 and < 1, got 1.0"),
    ],
)
def test_bad_settings_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        dataclasses.replace(MetropolisConfig(), **fields)
    assert message in str(error.value)
