from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_bayes.chains.energy_settings import FIRST_STEP, MAX_DENSE, RATES, settle_energy
from hf_bayes.chains.sampling import sample
from hf_bayes.core.config import MethodConfig
from hf_bayes.core.rng import generator
from hf_bayes.methods.averaging.map import MAPConfig
from hf_bayes.methods.mcmc.gps import GPSConfig
from hf_bayes.methods.mcmc.hmc import HMCConfig
from hf_bayes.methods.mcmc.metropolis import MetropolisConfig
from hf_bayes.methods.sgmcmc.baoab import BAOABConfig
from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from hf_bayes.methods.sgmcmc.sghmc_euler import SGHMCEulerConfig
from hf_bayes.methods.variational.ivon import IVONConfig
from tests.chains.bowl import bowl

STDS = torch.tensor([0.01, 1.0, 10.0], dtype=torch.float64)


def stretched(theta: Tensor, batch: object) -> Tensor:
    """U of independent normals around 0.5 standard deviations, whose curvatures differ by a factor of a million."""
    return 0.5 * (theta / STDS - 0.5).square().sum(1)


def assert_law(draws: Tensor) -> None:
    """Check mean and standard deviation of draws [M, S, 3] in units of ``STDS``.

    128 chains of 8 draws that are half a relaxation apart: an ESS of about 500, so 4 standard errors are .18 and 13 %.
    """
    scaled = draws.flatten(0, 1) / STDS
    assert (scaled.mean(0) - 0.5).abs().max() < 0.18
    assert (scaled.std(0) - 1).abs().max() < 0.13


def draws_of(method: MethodConfig, **changes: Any) -> Tensor:
    theta = torch.zeros(128, 3, dtype=torch.float64)
    arguments: dict[str, Any] = {"num_steps": 480, "burn_in": 320, "thin": 20, **changes}
    found: Tensor = sample(stretched, theta, method, **arguments).draws
    return found


@pytest.mark.parametrize("method", [SGHMCConfig(), BAOABConfig()], ids=["sghmc", "baoab"])
@pytest.mark.statistics
def test_a_sampler_needs_no_learning_rate(method: MethodConfig) -> None:
    assert_law(draws_of(method))


@pytest.mark.statistics
def test_the_check_of_the_law_sees_half_the_temperature() -> None:
    with pytest.raises(AssertionError):
        assert_law(draws_of(SGHMCConfig(temperature=0.5)))
    with pytest.raises(AssertionError):  # one step size for all directions: the wide one stands still
        assert_law(draws_of(SGHMCConfig(), learning_rate=1e-6))


@pytest.mark.statistics
def test_a_sampler_knows_correlations() -> None:
    stds = torch.logspace(-1, 1, 20, dtype=torch.float64)
    covariance = stds[:, None] * torch.full((20, 20), 0.95, dtype=torch.float64).fill_diagonal_(1.0) * stds
    precision = torch.linalg.inv(covariance)

    def energy(theta: Tensor, batch: object) -> Tensor:
        return 0.5 * ((theta @ precision) * theta).sum(1)

    def draws(**fields: Any) -> Tensor:
        start = torch.full((32, 20), 0.5, dtype=torch.float64)
        scaled = sample(energy, start, SGHMCConfig(**fields), num_steps=1000, thin=10).draws.flatten(0, 1) / stds
        return scaled

    # 32 chains of 35 draws, .25 (1 - beta) / h^2 = 2.5 updates apart from independence: ESS above 700, so 4 standard
    # errors of a standard deviation are 11 %
    assert (draws().std(0) - 1).abs().max() < 0.11
    assert (draws(whitening="diagonal").std(0) - 1).abs().min() > 0.11


def test_many_parameters_have_a_diagonal() -> None:
    def whitening(dim: int) -> Any:
        found = sample(bowl, torch.ones(1, dim), SGHMCConfig(), num_steps=60).method
        return getattr(found, "whitening", None)

    assert whitening(3) == "full"
    assert whitening(MAX_DENSE + 1) == "diagonal"


@pytest.mark.parametrize("whitening", ["diagonal", "full"])
def test_a_start_on_a_saddle_has_a_scale(whitening: Any) -> None:
    def energy(theta: Tensor, batch: object) -> Tensor:  # curvatures -4, 12 and 25 at 0
        return (theta[:, 0].square() - 1).square() + 6 * theta[:, 1].square() + 12.5 * theta[:, 2].square()

    config = SGHMCConfig(whitening=whitening, warm_start_steps=0)
    found = sample(energy, torch.zeros(2, 3, dtype=torch.float64), config, num_steps=100)
    torch.testing.assert_close(found.state.root[0, :3].sort().values, torch.tensor([0.2, 12**-0.5, 0.5]).double())


@pytest.mark.statistics
def test_a_sampler_of_minibatches_needs_no_learning_rate() -> None:
    rows = torch.randn(64, 1, generator=generator("rows"), dtype=torch.float64)
    order = generator("order")

    def energy(theta: Tensor, batch: Tensor) -> Tensor:  # precision 64 around the mean of the rows
        return 32 * (theta[:, None] - batch).square().sum(2).mean(1)

    def batches() -> Iterator[Tensor]:
        yield from rows[torch.randperm(64, generator=order)].split(8)

    result = sample(energy, torch.zeros(128, 1, dtype=torch.float64), SGHMCConfig(), num_steps=600, num_data=64,
                    batches=batches, thin=10)  # fmt: skip
    scaled = (result.draws - rows.mean()) * 8
    # heating adds at most 10 %, that is 5 % of a standard deviation; 4 standard errors at ESS 500 are .18 and 13 %
    assert abs(float(scaled.mean())) < 0.18
    assert 0.87 < float(scaled.std()) < 1.18
    relaxation = result.info["relaxation"]
    assert relaxation[relaxation.isfinite()].min() > 1


def test_a_run_without_a_rate_says_what_it_chose() -> None:
    result = sample(stretched, torch.zeros(2, 3, dtype=torch.float64), SGHMCConfig(), num_steps=100)
    assert result.method is not None
    assert result.method.warm_start_steps == 50
    assert result.method.burn_in == 65
    assert result.method.warm_start_learning_rate is not None
    assert result.draws.shape[1] == 35


@pytest.mark.statistics
def test_a_kernel_that_adapts_needs_no_learning_rate() -> None:
    assert_law(draws_of(HMCConfig(), num_steps=150, burn_in=100, thin=10))


def test_optimisers_and_natural_gradients_need_no_learning_rate() -> None:
    theta = torch.zeros(1, 3, dtype=torch.float64)
    scale = torch.tensor([0.1, 1.0, 3.0], dtype=torch.float64)

    def energy(theta: Tensor, batch: object) -> Tensor:
        return 0.5 * (theta / scale - 0.5).square().sum(1)

    assert torch.allclose(sample(energy, theta, MAPConfig(), num_steps=600).draws[0, -1], scale / 2, rtol=1e-2)
    found = sample(energy, theta, IVONConfig(), num_steps=1000).approximation
    assert torch.allclose(found.mean, scale / 2, rtol=1e-2)


def test_settings_depend_on_the_method_and_the_run() -> None:
    asked: list[int] = []

    def find_rate(steps: int) -> float:
        asked.append(steps)
        return 0.3

    def settings_of(method: MethodConfig, burn_in: float = 0) -> Any:
        return settle_energy(method, None, dim=3, num_steps=1000, burn_in=burn_in, find_rate=find_rate)

    assert settings_of(HMCConfig(), burn_in=0.5).learning_rate == FIRST_STEP
    assert settings_of(HMCConfig(step_size=0.2)).learning_rate == 1.0
    assert settings_of(IVONConfig()).learning_rate == pytest.approx(1000**-0.5)
    assert asked == []
    assert settings_of(MAPConfig()).learning_rate == 0.3
    assert settings_of(SGHMCConfig()).method.warm_start_learning_rate == 0.3
    assert settings_of(SGHMCConfig(warm_start_learning_rate=0.1)).method.warm_start_learning_rate == 0.1
    assert asked == [1000, 250]
    assert settings_of(SGHMCConfig(), burn_in=600).method.burn_in == 600
    assert settle_energy(SGHMCConfig(), 0.1, dim=3, num_steps=10, burn_in=0, find_rate=find_rate).learning_rate == 0.1


def test_rates_at_which_the_energy_is_not_finite_are_left_out() -> None:
    def energy(theta: Tensor, batch: object) -> Tensor:
        wall = torch.where(theta.abs() < 0.05, 0.0, torch.inf).sum(1)
        return 1e4 * (theta - 0.02).square().sum(1) + wall

    result = sample(energy, torch.zeros(1, 2, dtype=torch.float64), MAPConfig(), num_steps=300)
    assert torch.allclose(result.draws[0, -1], torch.full((2,), 0.02, dtype=torch.float64), atol=1e-3)
    with pytest.raises(FloatingPointError, match="non-finite energy"):
        sample(lambda theta, batch: energy(theta + 1, batch), torch.zeros(1, 2), MAPConfig(), num_steps=300)
    assert len(RATES) == len(set(RATES))


def walled(error: str, width: float, theta: Tensor) -> Tensor:
    """U of a narrow valley at 0.02, which raises where an element of theta is ``width`` away from 0 or more."""
    if bool((theta.abs() >= width).any()):
        if error == "factorisation":
            torch.linalg.cholesky(-torch.eye(2))
        elif error == "constraint":
            torch.distributions.Normal(0.0, torch.tensor(-1.0), validate_args=True)
        elif error == "division":
            1 / 0  # noqa: B018
        raise TypeError("a mistake in the program")
    return 1e4 * (theta - 0.02).square().sum(1)


KINDS = {"factorisation": torch.linalg.LinAlgError, "constraint": ValueError, "division": ZeroDivisionError}


@pytest.mark.parametrize("method", [MAPConfig(), SGHMCConfig(num_chains=1, whitening="diagonal")])
@pytest.mark.parametrize("error", KINDS)
def test_rates_at_which_the_energy_raises_are_left_out(error: str, method: MethodConfig) -> None:
    start = torch.zeros(1, 2, dtype=torch.float64)
    result = sample(lambda theta, batch: walled(error, 0.08, theta), start, method, num_steps=300)
    assert (result.draws[0, -1] - 0.02).abs().max() < 0.05  # 5 standard deviations


@pytest.mark.parametrize("error", KINDS)
def test_a_trial_without_a_rate_left_says_which_was_tried(error: str) -> None:
    words = "at learning rate 0.001, the smallest that was tried because none was given; the larger ones failed, too"
    with pytest.raises(KINDS[error], match=words):
        sample(lambda theta, batch: walled(error, 5e-4, theta), torch.zeros(1, 2), MAPConfig(), num_steps=300)


@pytest.mark.parametrize("error", KINDS)
def test_an_energy_that_raises_at_the_start_raises_as_it_is(error: str) -> None:
    with pytest.raises(KINDS[error]) as caught:
        sample(lambda theta, batch: walled(error, 0.0, theta), torch.zeros(1, 2), MAPConfig(), num_steps=300)
    assert not hasattr(caught.value, "__notes__")


def test_a_mistake_in_the_energy_ends_the_trial() -> None:
    with pytest.raises(TypeError, match="a mistake in the program") as caught:
        sample(lambda theta, batch: walled("none", 0.08, theta), torch.zeros(1, 2), MAPConfig(), num_steps=300)
    assert not hasattr(caught.value, "__notes__")


def assert_warm_start(method: MethodConfig, **given: Any) -> None:
    """Check that all of burn-in is a warm start, and that AdamW's rate reaches it."""
    arguments: dict[str, Any] = {"num_steps": 60, "burn_in": 40, **given}
    stated = sample(bowl, torch.ones(1, 3), replace(method, warm_start_learning_rate=1e-4), **arguments)
    assert stated.method == replace(method, warm_start_learning_rate=1e-4, warm_start_steps=40)
    assert bool((stated.state.warm_step == 40).all())


@pytest.mark.parametrize("burn_in", [40, 0.67])
def test_a_stated_rate_makes_burn_in_a_warm_start(burn_in: float) -> None:
    assert_warm_start(SGHMCConfig(), learning_rate=0.1, burn_in=burn_in)
    assert_warm_start(HMCConfig(), learning_rate=0.1, burn_in=burn_in)


@pytest.mark.parametrize("method", [IVONConfig(), HMCConfig(step_size=0.1), GPSConfig(max_std=0.1)])
def test_a_warm_start_needs_no_learning_rate(method: MethodConfig) -> None:
    assert_warm_start(method)


def test_a_kernel_adapts_after_its_warm_start() -> None:
    def settings_of(method: MethodConfig) -> Any:
        return settle_energy(method, None, dim=3, num_steps=100, burn_in=0.5, find_rate=lambda steps: 0.3)

    assert settings_of(HMCConfig(warm_start_steps=49)).learning_rate == FIRST_STEP
    for warm in ({"warm_start_steps": 50}, {"warm_start_learning_rate": 0.1}):  # no update of burn-in is left
        with pytest.raises(ValueError, match="hmc with these settings needs a learning_rate, got None"):
            settings_of(HMCConfig(**warm))


@pytest.mark.parametrize(
    ("method", "changes", "message"),
    [
        (SGHMCEulerConfig(), {}, "sghmc_euler with these settings needs a learning_rate, got None"),
        (HMCConfig(), {}, "hmc with these settings needs a learning_rate, got None"),  # no burn-in to adapt in
        (MetropolisConfig(target_acceptance=None), {"burn_in": 9}, "metropolis with these settings needs a learning"),
        (SGHMCConfig(whitening="kronecker"), {}, "whitening='kronecker' is made of the inputs and outputs of modules"),
        (SGHMCConfig(), {"num_steps": 6}, "would collect 0 draws: 6 updates, the first 8 of them"),
        (IVONConfig(warm_start_steps=40), {}, "ivon: 40 updates with warm_start_steps=40 leave none for the method"),
        (MAPConfig(warm_start_learning_rate=0.1), {}, "warm_start_learning_rate=0.1 of map .* burn-in, which has no"),
        (SGHMCConfig(), {"batches": iter([None] * 9)}, "passes over the data more than once, .* got list_iterator"),
    ],
)
def test_runs_that_cannot_find_a_rate_are_refused(method: MethodConfig, changes: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sample(bowl, torch.zeros(2, 3), method, **{"num_steps": 40, **changes})


def test_an_energy_without_curvature_gives_no_step_size() -> None:
    with pytest.raises(ValueError, match="is zero or not finite after the warm start"):
        sample(lambda theta, batch: theta.sum(1), torch.zeros(2, 3), SGHMCConfig(), num_steps=60)
