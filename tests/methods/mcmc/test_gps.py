from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_bayes.core.rng import generator
from hf_bayes.methods.mcmc import gps
from hf_bayes.methods.mcmc.gps import GPSConfig, GPSState
from hf_bayes.methods.sgmcmc import agps
from hf_bayes.methods.sgmcmc.agps import Parameters
from tests.methods.mcmc.targets import TARGETS, evaluator, features, logistic, moments, problem
from tests.streams import share_one_stream

Energy = Callable[[Tensor], Tensor]


@pytest.fixture(autouse=True)
def one_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    share_one_stream(monkeypatch, agps, gps)


def draws(
    config: GPSConfig,
    energy: Energy,
    start: Tensor,
    *,
    num_steps: int,
    burn_in: int,
    carried: bool = False,
    reference: Parameters | None = None,
) -> Tensor:
    """Return every fifth state, [M, S, d].

    Args:
        carried: use Algorithm 2 as printed, where mu goes from move to move.
        reference: the reference that burn-in would find.
    """
    rng, dim = [generator("moves")], start.shape[1]
    kernel = config.build(problem(num_steps=num_steps, burn_in=burn_in, dim=dim, learning_rate=1.0))
    state, evaluate, found = kernel.init(start, evaluator(energy), rng), evaluator(energy), []
    if reference is not None:
        state = state._replace(**reference._asdict())
    for step in range(num_steps):
        before = state
        state, _ = kernel.step(state, evaluate, rng)
        if carried:
            reference = Parameters(before.first, before.second)
            matched = agps.FAMILIES[config.family].match(before.theta, -before.gradient, reference, config.max_std)
            state = state._replace(first=matched.first, second=matched.second)
        if step >= burn_in and step % 5 == 0:
            found.append(state.theta)
    return torch.stack(found, 1)


def scores(values: Tensor, exact: Tensor) -> tuple[Tensor, Tensor]:
    """Return the errors [k] of the means of [M, S, k] in standard errors, and these in standard deviations."""
    means = values.mean(1)
    error = means.std(0) / len(means) ** 0.5
    return (means.mean(0) - exact) / error, error / values.flatten(0, 1).std(0)


def normals(num_chains: int, dim: int = 1) -> Tensor:
    return torch.randn(num_chains, dim, dtype=torch.float64, generator=generator("start"))


def bimodal(theta: Tensor) -> Tensor:
    """Return U of 0.3 N(-2, 0.7^2) + 0.7 N(2, 1.2^2): mean 0.8, a third of the mass below 0."""
    x = theta[:, 0]
    left, right = math.log(0.3 / 0.7) - 0.5 * ((x + 2) / 0.7) ** 2, math.log(0.7 / 1.2) - 0.5 * ((x - 2) / 1.2) ** 2
    return -torch.logaddexp(left, right)


def bimodal_mean(carried: bool) -> tuple[float, float]:
    """Return the share, and its Monte Carlo standard error."""
    found = draws(
        GPSConfig(max_std=5.0), bimodal, 2 * normals(2000), num_steps=2500, burn_in=1200, carried=carried
    ).mean((1, 2))
    return float(found.mean()), float(found.std()) / len(found) ** 0.5


@pytest.mark.statistics
def test_the_weights_of_two_modes_are_exact() -> None:
    mean, error = bimodal_mean(carried=False)
    assert error <= 0.01
    assert abs(mean - 0.8) < 4 * error


@pytest.mark.statistics
def test_the_weights_of_two_modes_catch_a_carried_mu() -> None:
    """The share with Algorithm 2 as printed is 0.88."""
    mean, error = bimodal_mean(carried=True)
    assert mean - 0.8 > 4 * error


@pytest.mark.parametrize("target", ["gaussian", "mixture"])
@pytest.mark.statistics
def test_moments_are_exact(target: str) -> None:
    found = draws(GPSConfig(max_std=3.0), TARGETS[target], 2 * normals(1500, 2), num_steps=2500, burn_in=1200)
    z, error = scores(features(found), moments(target, 1.0))
    assert error.max() < 0.01
    assert z.abs().max() < 4


def drift(config: GPSConfig, energy: Energy, exact: Tensor, reference: Parameters, moves: int = 100) -> Tensor:
    """Return the errors [k] of the moments of exact draws after moves with one reference, in standard errors."""
    kernel, rng, evaluate = config.build(problem()), [generator("moves")], evaluator(energy)
    state = kernel.init(exact, evaluate, rng)
    state = state._replace(**{k: v.expand_as(exact) for k, v in reference._asdict().items()})
    for _ in range(moves):
        state, _ = kernel.step(state, evaluate, rng)
    ends, starts = (torch.cat([theta, theta.square()], 1)[:, None] for theta in (state.theta, exact))
    z, error = scores(ends - starts, torch.zeros(ends.shape[2]))
    assert error.max() * (ends - starts).std() < 0.02 * ends.std()
    return z


def numbers(*values: float) -> Tensor:
    return torch.tensor([values], dtype=torch.float64)


def mixed(one: Tensor, other: Tensor, weight: float) -> Tensor:
    chosen = torch.rand(one.shape, dtype=torch.float64, generator=generator("weights")) < weight
    return torch.where(chosen, one, other)


def gammas(alpha: float, count: int = 20_000) -> Tensor:
    return torch._standard_gamma(
        torch.full((count, 1), alpha, dtype=torch.float64), generator=generator("gamma", alpha)
    )


def banana_case() -> tuple[GPSConfig, Energy, Tensor, Parameters]:
    x, y = normals(20_000, 2).unbind(1)
    exact = torch.stack([x, x.square() / 2 + y], 1)
    return GPSConfig(max_std=3.0), TARGETS["banana"], exact, Parameters(numbers(0.2, 0.4), numbers(1.0, 1.0))


def gamma_case() -> tuple[GPSConfig, Energy, Tensor, Parameters]:
    """Return U of 0.4 Gamma(2, 1) + 0.6 Gamma(4, 1/2)."""

    def energy(theta: Tensor) -> Tensor:
        x = theta[:, 0]
        return -torch.logaddexp(math.log(0.4) + x.log() - x, math.log(0.6 / 6 / 16) + 3 * x.log() - x / 2)

    exact = mixed(gammas(2.0), 2 * gammas(4.0), 0.4)
    return GPSConfig(family="gamma"), energy, exact, Parameters(numbers(2.0), numbers(0.4))


def beta_case() -> tuple[GPSConfig, Energy, Tensor, Parameters]:
    """Return U of 0.5 Beta(2, 6) + 0.5 Beta(5, 2)."""

    def energy(theta: Tensor) -> Tensor:
        x = theta[:, 0]
        one = math.log(42) + x.log() + 5 * (1 - x).log()
        return -torch.logaddexp(one, math.log(30) + 4 * x.log() + (1 - x).log())

    a, b, c, d = gammas(2.0), gammas(6.0), gammas(5.0), gammas(2.0 + 1e-9)
    return (
        GPSConfig(family="beta"),
        energy,
        mixed(a / (a + b), c / (c + d), 0.5),
        Parameters(numbers(2.0), numbers(2.0)),
    )


CASES = {"banana": banana_case, "gamma": gamma_case, "beta": beta_case}
"""Moves with heavy tails, from which a chain returns too slowly to be tested from any start but its law."""


@pytest.mark.parametrize("case", CASES)
@pytest.mark.statistics
def test_exact_draws_are_left_as_they_are(case: str) -> None:
    assert drift(*CASES[case]()).abs().max() < 4


@pytest.mark.parametrize("case", CASES)
@pytest.mark.statistics
def test_exact_draws_catch_a_forgotten_reverse_proposal(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for family in (agps.GaussianFamily, agps.GammaFamily, agps.BetaFamily):
        monkeypatch.setattr(family, "log_prob", lambda self, theta, at: torch.zeros_like(theta))
    assert drift(*CASES[case]()).abs().max() > 4


@pytest.mark.statistics
def test_exact_draws_catch_a_wrong_temperature() -> None:
    config, *rest = banana_case()
    assert drift(dataclasses.replace(config, temperature=1.1), *rest).abs().max() > 4


@pytest.mark.statistics
def test_moments_of_a_logistic_regression_are_exact() -> None:
    found = draws(GPSConfig(max_std=3.0), logistic, 2 * normals(1500, 2), num_steps=2500, burn_in=1200)
    z, error = scores(features(found)[..., :5], moments("logistic", 1.0)[:5])
    assert error.max() < 0.01
    assert z.abs().max() < 4


def banana_scores(max_std: float, *, num_chains: int, num_steps: int, burn_in: int = 1500) -> tuple[Tensor, Tensor]:
    """The starts are dispersed, and a-GPS disperses them further."""
    start = 2 * normals(num_chains, 2)
    found = draws(GPSConfig(max_std=max_std), TARGETS["banana"], start, num_steps=num_steps, burn_in=burn_in)
    return scores(features(found), moments("banana", 1.0))


@pytest.mark.statistics
def test_burn_in_brings_chains_back_from_the_tails_of_the_banana() -> None:
    z, error = banana_scores(3.0, num_chains=2500, num_steps=2000)
    assert error.max() < 0.012
    assert z.abs().max() < 4


@pytest.mark.statistics
def test_the_tails_catch_a_burn_in_that_does_not_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Moves with the frozen reference do not change the law of the draws."""
    monkeypatch.setattr(gps, "walk", lambda state, family, rngs: state.theta)
    assert banana_scores(3.0, num_chains=2500, num_steps=2000)[0].abs().max() > 4


@pytest.mark.statistics
def test_a_cap_of_ten_needs_a_longer_burn_in() -> None:
    """The documented limit: 5000 updates correct the tails, 1500 do not."""
    z, error = banana_scores(10.0, num_chains=2500, num_steps=5500, burn_in=5000)
    assert error.max() < 0.02
    assert z.abs().max() < 4
    assert banana_scores(10.0, num_chains=2500, num_steps=2000)[0].abs().max() > 4


def still(spread: float) -> float:
    """Return the share of chains that never move in 500 updates after burn-in, from N(0, spread^2) on N(0, 1)."""
    start = spread * normals(2000)
    found = draws(GPSConfig(max_std=1.0), lambda theta: theta.square().sum(1) / 2, start, num_steps=2000, burn_in=1500)
    return float((found == found[:, :1]).all(1).all(1).double().mean())


@pytest.mark.statistics
def test_starts_from_afar_leave_chains_that_stand_still() -> None:
    """The documented effect of starts; a share of 0.05 of 2000 chains has a standard error of 0.005."""
    assert 0.03 < still(14.0) < 0.08
    assert still(3.0) == 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_moments_of_the_banana_are_exact_in_a_long_run() -> None:
    z, error = banana_scores(1.0, num_chains=12_000, num_steps=3500)
    assert error.max() < 0.01
    assert z.abs().max() < 4


@pytest.mark.parametrize("family", ["gamma", "beta"])
def test_burn_in_walks_inside_the_support_only(family: str) -> None:
    """The tested point is half a standard deviation from the edge."""
    theta = torch.full((1000, 1), 0.05, dtype=torch.float64)
    blank = torch.zeros_like(theta)
    state = GPSState(theta, blank[:, 0], blank, blank, blank, theta, blank + 0.01, blank[:, 0].long())
    proposal = gps.walk(state, agps.FAMILIES[family], [generator("walk")])
    assert (proposal > 0).all()
    assert 0 < int((proposal == theta).sum()) < 500  # what would have left stays


def test_the_reference_is_frozen_after_half_of_burn_in() -> None:
    kernel, rng, evaluate = GPSConfig().build(problem(burn_in=20)), [generator(0)], evaluator(TARGETS["gaussian"])
    state, references = kernel.init(normals(5, 2), evaluate, rng), []
    for _ in range(40):
        state, _ = kernel.step(state, evaluate, rng)
        references.append(state.first)
    assert all(torch.equal(reference, references[10]) for reference in references[10:])
    assert not torch.equal(references[8], references[9])
    torch.testing.assert_close(references[10], state.mean)  # the Gaussian's fit


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": 0.0}, "temperature must be > 0, got 0"),
        ({"max_std": -1.0}, "max_std must be a finite number > 0, got -1.0"),
        ({"family": "normal"}, "family must be one of gaussian, gamma, beta"),
    ],
)
def test_bad_settings_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GPSConfig(**fields)
