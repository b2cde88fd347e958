"""Settings of runs that have no learning rate."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hf_bayes.core.config import MethodConfig
from hf_bayes.core.schedules import Cyclical, Linear, RobbinsMonro
from hf_bayes.methods.averaging.ensemble import EnsembleConfig
from hf_bayes.methods.averaging.map import MAPConfig
from hf_bayes.methods.averaging.swa import SWAConfig
from hf_bayes.methods.laplace.laplace import LaplaceConfig
from hf_bayes.methods.mcmc.gps import GPSConfig
from hf_bayes.methods.mcmc.hmc import HMCConfig
from hf_bayes.methods.mcmc.metropolis import MetropolisConfig
from hf_bayes.methods.mcmc.penalty import PenaltyConfig
from hf_bayes.methods.registry import METHODS
from hf_bayes.methods.sgmcmc.agps import AGPSConfig
from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from hf_bayes.methods.sgmcmc.sgld import SGLDConfig
from hf_bayes.methods.variational.ivon import IVONConfig
from hf_bayes.methods.variational.mean_field import MeanFieldConfig
from hf_bayes.objectives.model_settings import Settings, settle_model
from hf_bayes.objectives.range_test import RangeTest

ASKED: list[int] = []


def trial(adamw_steps: int) -> RangeTest:
    ASKED.append(adamw_steps)
    return RangeTest(0.02, {0.04: 1.0}, 0.04, 10)


@pytest.fixture(autouse=True)
def _nothing_asked() -> None:
    ASKED.clear()


def test_a_given_learning_rate_changes_nothing() -> None:
    method = SGHMCConfig()
    assert settle_model(method, 0.1, 100, trial) == Settings(method, 0.1)
    assert not ASKED


@pytest.mark.parametrize("method", [MAPConfig(), EnsembleConfig(), MeanFieldConfig(), LaplaceConfig()])
def test_optimisers_try_rates_and_fall_linearly(method: MethodConfig) -> None:
    found = settle_model(method, None, 1000, trial)
    assert found.learning_rate == 0.02
    assert found.method == replace(method, schedule=Linear())
    assert ASKED == [1000]


def test_a_schedule_of_the_users_stays() -> None:
    schedule = RobbinsMonro(offset=10)
    assert settle_model(MAPConfig(schedule=schedule), None, 1000, trial).method.schedule == schedule


@pytest.mark.parametrize("method", [SGHMCConfig(), SGLDConfig()])
@pytest.mark.parametrize(
    ("num_steps", "warm", "burn_in"), [(300, 150, 195), (600, 240, 330), (800, 240, 400), (2400, 600, 1200)]
)
def test_samplers_begin_with_adamw(method: MethodConfig, num_steps: int, warm: int, burn_in: int) -> None:
    """It has 240 updates, at most half of a short run, and at least a quarter of a long one."""
    found = settle_model(method, None, num_steps, trial)
    assert found.learning_rate is None
    settings = {"warm_start_steps": warm, "burn_in": burn_in, "warm_start_learning_rate": 0.02}
    assert found.method == replace(method, **settings)
    assert [warm] == ASKED


def test_a_warm_start_and_a_burn_in_of_the_users_stay() -> None:
    method = SGHMCConfig(warm_start_steps=30, warm_start_learning_rate=0.5, burn_in=0.2)
    assert settle_model(method, None, 1000, None) == Settings(method, None)
    assert settle_model(SGHMCConfig(warm_start_steps=0), None, 1000, None).method.num_warm_start_steps == 0
    short = settle_model(SGHMCConfig(burn_in=0.2), None, 1000, trial).method
    assert (short.warm_start_steps, short.burn_in) == (100, 0.2)


def test_a_warm_start_without_a_length_lasts_for_burn_in() -> None:
    method = SWAConfig(warm_start_learning_rate=3e-3, burn_in=0.4)
    assert settle_model(method, 0.03, 100, None).method == replace(method, warm_start_steps=40)
    given = replace(method, warm_start_steps=0)
    assert settle_model(given, 0.03, 100, None).method == given


def test_the_shortest_run_can_measure_its_noise_in_time() -> None:
    found = settle_model(SGHMCConfig(warm_start_learning_rate=0.1), None, 20, None).method
    assert (found.warm_start_steps, found.burn_in) == (10, 15)


def test_an_average_of_iterates_keeps_the_rate_that_was_found() -> None:
    found = settle_model(SWAConfig(), None, 1000, trial)
    assert found.method == SWAConfig()  # no schedule
    assert found.learning_rate == settle_model(MAPConfig(), None, 1000, trial).learning_rate


def test_a_resumed_run_takes_the_rate_that_was_found() -> None:
    first = settle_model(MAPConfig(), None, 1000, trial)
    assert first.found_rate == 0.02
    assert first.trial == trial(1000)
    ASKED.clear()
    assert settle_model(MAPConfig(), None, 1000, trial, found=0.3) == Settings(first.method, 0.3, 0.3, None)
    sampler = settle_model(SGHMCConfig(), None, 1000, trial, found=0.3)
    assert sampler.method.warm_start_learning_rate == 0.3
    assert sampler[1:] == (None, 0.3, None)
    assert not ASKED


def test_a_stated_warm_start_needs_no_learning_rate() -> None:
    method = AGPSConfig(max_std=0.1, warm_start_learning_rate=3e-3, burn_in=0.4)
    assert settle_model(method, None, 100, None) == Settings(replace(method, warm_start_steps=40), 1.0)
    assert settle_model(replace(method, burn_in=None), None, 100, None).method.warm_start_steps == 50
    stated = IVONConfig(warm_start_learning_rate=3e-3, burn_in=36)
    assert settle_model(stated, None, 100, None).learning_rate == 0.125


def test_a_warm_start_as_long_as_the_run_is_refused() -> None:
    with pytest.raises(ValueError, match="ivon: 40 updates with warm_start_steps=40 leave none for the method"):
        settle_model(IVONConfig(warm_start_steps=40), None, 40, None)


@pytest.mark.parametrize(
    "method",
    [
        AGPSConfig(), HMCConfig(), SWAConfig(optimizer="sgd"), SGHMCConfig(temperature=0.0),
        SGHMCConfig(preconditioner="layerwise"), SGHMCConfig(correct_gradient_noise=True),
        SGHMCConfig(measure_gradient_noise=True),
    ],
)  # fmt: skip
def test_a_method_that_finds_no_rate_asks_for_one(method: MethodConfig) -> None:
    with pytest.raises(ValueError, match=f"{method.name} .*needs a learning_rate, got None: give one"):
        settle_model(method, None, 1000, trial)


@pytest.mark.parametrize(
    "method",
    [
        HMCConfig(step_size=0.1), MetropolisConfig(proposal_std=0.1), GPSConfig(max_std=0.1), AGPSConfig(max_std=0.1),
        PenaltyConfig(step_size=0.1),
    ],
)  # fmt: skip
def test_a_method_with_a_step_of_its_own_needs_none(method: MethodConfig) -> None:
    assert settle_model(method, None, 1000, None) == Settings(method, 1.0)


def test_a_natural_gradient_takes_its_rate_from_the_length() -> None:
    assert settle_model(IVONConfig(), None, 400, None) == Settings(IVONConfig(), 0.05)
    assert settle_model(IVONConfig(warm_start_steps=300), None, 400, None).learning_rate == 0.1
    assert settle_model(IVONConfig(), 0.2, 400, None).learning_rate == 0.2


def test_the_message_names_methods_that_find_a_rate() -> None:
    with pytest.raises(
        ValueError, match=r"a method that finds one itself \(such as .*; hf_bayes\.METHODS has"
    ) as caught:
        settle_model(HMCConfig(), None, 1000, None)
    named = str(caught.value).split("such as ")[1].split(";")[0].split(", ")
    assert len(named) == 3
    assert {METHODS[name]().requirements.learning_rate for name in named} <= {"whitening", "range_test", "from_length"}


def test_a_sampler_with_a_schedule_asks_for_its_peak() -> None:
    with pytest.raises(ValueError, match=r"schedule='cyclical' needs a learning_rate, the peak of the schedule"):
        settle_model(SGHMCConfig(schedule=Cyclical()), None, 1000, trial)


def test_a_trial_that_is_not_possible_is_told() -> None:
    with pytest.raises(ValueError, match=r"map without a learning rate tries several .* give trial_updates, or a lear"):
        settle_model(MAPConfig(), None, 1000, None)
