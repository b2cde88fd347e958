from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from hf_bayes.chains.sampling import sample
from hf_bayes.core.rng import generator
from hf_bayes.core.types import Evaluation, Problem
from hf_bayes.distributions.energy import FlatPrior
from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from hf_bayes.methods.sgmcmc.sgld import SGLDConfig
from tests.methods.sgmcmc.laws import distance_from_sgd

N, LR = 10, 0.1  # U = N |theta|^2 / 2: l * lambda_max of U / N is 0.1


def gaussian(theta: Tensor, batch: None) -> Tensor:
    return 0.5 * N * theta.square().sum(1)


def variance_error(config: SGLDConfig, law: float, *, num_data: float = N) -> tuple[float, float]:
    """Return the relative error of the pooled variance, and its effective number of draws."""
    start = torch.randn(4, 256, generator=generator("start")) * math.sqrt(config.temperature / N)
    draws = sample(
        gaussian, start, config, num_steps=1500, learning_rate=LR, num_data=num_data, burn_in=100, seed=1
    ).draws
    squares = draws.square()
    means = squares.mean(1).flatten()
    return squares.mean().item() / law - 1, len(means) * (squares.var() / means.var()).item()


@pytest.mark.parametrize("temperature", [0.1, 1.0, 4.0])
@pytest.mark.statistics
def test_variance_on_a_gaussian_is_the_discretisations(temperature: float) -> None:
    config, law = SGLDConfig(temperature=temperature), temperature / N / (1 - LR / 2)
    error, ess = variance_error(config, law)
    assert ess > 40_000
    assert abs(error) < 0.03  # 4 standard errors at ESS 40 000: 4 * sqrt(2 / 40 000) = 0.028
    twins = {  # the check catches them
        "noise without sqrt(2)": variance_error(dataclasses.replace(config, temperature=temperature / 2), law),
        "N forgotten in the noise": variance_error(dataclasses.replace(config, temperature=temperature * N), law),
        "N forgotten": variance_error(config, law, num_data=1),
    }
    for name, (twin_error, _) in twins.items():
        assert abs(twin_error) > 0.03, name


@pytest.mark.parametrize("step_size", [0.05, 0.5, 1.5])
@pytest.mark.statistics
def test_stationary_variance_is_that_of_the_docstring(step_size: float) -> None:
    curvature, temperature, num_data = 0.8, 0.7, 7
    problem = Problem(num_data, FlatPrior(), num_data * step_size, num_steps=1, burn_in=0, shapes={"": (1,)})

    def move(theta: float, temperature: float) -> float:
        rule, rngs = SGLDConfig(temperature=temperature).build(problem), [generator(1)]
        state = rule.init(torch.tensor([[theta]], dtype=torch.float64), rngs)
        evaluation = Evaluation(torch.zeros(1), -curvature * state.theta)
        return rule.update(state, evaluation, problem.learning_rate, rngs)[0].theta.item()

    slope = move(1.0, 0.0)
    noise = move(0.0, temperature) / torch.randn(1, generator=generator(1), dtype=torch.float64).item()
    expected = temperature / curvature / (1 - step_size * curvature / 2)
    assert noise**2 / (1 - slope**2) == pytest.approx(expected, rel=1e-12)


def test_zero_temperature_is_torch_sgd_also_under_a_schedule() -> None:
    assert distance_from_sgd(SGLDConfig(temperature=0.0), [0.05 * (1 - step / 100) for step in range(100)]) < 1e-12


def test_it_is_sghmc_without_momentum() -> None:
    start = torch.randn(3, 5, generator=generator("start"), dtype=torch.float64)
    problem = Problem(N, FlatPrior(), LR, num_steps=1, burn_in=0, shapes={"": (5,)})
    evaluation = Evaluation(torch.zeros(3), -N * start)
    ends = []
    for config in (SGLDConfig(), SGHMCConfig(momentum=0.0)):
        rule = config.build(problem)
        state = rule.init(start, [generator("init", c) for c in range(3)])
        state, _ = rule.update(state, evaluation, LR, [generator("noise", c) for c in range(3)])
        ends.append(state.theta)
    assert (ends[0] - ends[1]).abs().max() < 1e-14


@pytest.mark.statistics
def test_configurational_temperature_is_t() -> None:
    theta = math.sqrt(1 / N) * torch.randn(16, 1024, generator=generator("start"), dtype=torch.float64)
    info = sample(gaussian, theta, SGLDConfig(), num_steps=1, learning_rate=LR, num_data=N).info
    # 4 standard errors of 16 384 squares: 4 * sqrt(2 / 16 384) = 0.044
    assert info["configurational_temperature"].mean() == pytest.approx(1.0, abs=0.044)
