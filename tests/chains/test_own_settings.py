"""Settings of runs without a learning rate that models and energies share."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from hf_bayes.chains.own_settings import (
    ChosenSettings,
    best_rate,
    choose_settings,
    last_third,
    settled,
    with_stated_warm_start,
)
from hf_bayes.core.config import MethodConfig
from hf_bayes.core.schedules import Linear
from hf_bayes.core.types import FinalPassResult
from hf_bayes.distributions.approximations import Draws
from hf_bayes.methods.averaging.map import MAPConfig
from hf_bayes.methods.averaging.swa import SWAConfig
from hf_bayes.methods.mcmc.hmc import HMCConfig
from hf_bayes.methods.sgmcmc.agps import AGPSConfig
from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from hf_bayes.methods.variational.ivon import IVONConfig


def test_only_rates_of_adamw_need_a_trial() -> None:
    asked = {
        method.name: choose_settings(method, 1000, burn_in=500).adamw_steps
        for method in (MAPConfig(), SGHMCConfig(), IVONConfig(), AGPSConfig(max_std=0.1), HMCConfig(step_size=0.1))
    }
    assert asked == {"map": 1000, "sghmc": 250, "ivon": 0, "agps": 0, "hmc": 0}
    assert choose_settings(SGHMCConfig(warm_start_learning_rate=0.1), 1000, burn_in=500).adamw_steps == 0


def test_what_a_trial_finds_is_the_rate_of_adamw() -> None:
    found = choose_settings(MAPConfig(), 9, burn_in=0).with_found(0.3)
    assert found == ChosenSettings(MAPConfig(schedule=Linear()), 0.3)
    found = choose_settings(SGHMCConfig(), 1000, burn_in=500).with_found(0.3)
    assert found.method.warm_start_learning_rate == 0.3
    assert found.learning_rate is None


@pytest.mark.parametrize("method", [SWAConfig(), MAPConfig(), IVONConfig(), AGPSConfig(max_std=0.1)])
def test_a_stated_rate_is_for_a_warm_start_of_all_burn_in(method: MethodConfig) -> None:
    stated = replace(method, warm_start_learning_rate=3e-3)
    found = choose_settings(stated, 100, burn_in=40)
    assert found.method.warm_start_steps == 40
    assert found.method == replace(choose_settings(method, 100, burn_in=40).method, warm_start_steps=40,
                                   warm_start_learning_rate=3e-3)  # fmt: skip


def test_a_rate_from_the_length_counts_no_warm_start() -> None:
    assert choose_settings(IVONConfig(), 100, burn_in=36).learning_rate == 0.1
    assert choose_settings(IVONConfig(warm_start_learning_rate=3e-3), 100, burn_in=36).learning_rate == 0.125


@pytest.mark.parametrize("method", [IVONConfig(), MAPConfig(), SGHMCConfig(), AGPSConfig(max_std=0.1)])
@pytest.mark.parametrize("steps", [40, 41])
def test_a_warm_start_of_the_whole_run_is_refused(method: MethodConfig, steps: int) -> None:
    words = f"{method.name}: 40 updates with warm_start_steps={steps} leave none for the method: train longer, or lower"
    with pytest.raises(ValueError, match=words):
        choose_settings(replace(method, warm_start_steps=steps), 40, burn_in=20)


def test_a_run_without_updates_has_no_rate() -> None:
    with pytest.raises(ValueError, match="ivon: 0 updates with warm_start_steps=0 leave none"):
        choose_settings(IVONConfig(), 0, burn_in=0)


def test_a_warm_start_with_a_rate_and_no_length_is_burn_in() -> None:
    stated = SGHMCConfig(warm_start_learning_rate=0.1)
    assert with_stated_warm_start(stated, 7) == replace(stated, warm_start_steps=7)
    for other in (SGHMCConfig(), replace(stated, warm_start_steps=0)):
        assert with_stated_warm_start(other, 0) == other


def test_a_rate_of_a_warm_start_without_updates_is_refused() -> None:
    with pytest.raises(ValueError, match=r"warm_start_learning_rate=0.1 of sghmc .* burn-in, which has no"):
        with_stated_warm_start(SGHMCConfig(warm_start_learning_rate=0.1), 0)


def test_the_last_pass_replaces_the_fields_that_it_found() -> None:
    found = FinalPassResult(Draws(torch.zeros(1, 2), torch.tensor([0])), {}, fields={"temperature": 0.1})
    assert settled(SGHMCConfig(num_chains=4), found) == SGHMCConfig(num_chains=4, temperature=0.1)
    assert settled(SGHMCConfig(), found._replace(fields=None)) == SGHMCConfig()


def test_losses_that_are_not_finite_are_the_largest() -> None:
    assert best_rate({0.1: 2.0, 0.2: 1.0, 0.3: 3.0}) == 0.2
    assert best_rate({0.1: math.nan, 0.2: 1.0, 0.3: -math.inf}) == 0.2
    assert best_rate({0.1: math.nan, 0.2: math.nan}) == 0.1


def test_the_last_third_is_at_least_one_update() -> None:
    values = [torch.tensor([float(step)]) for step in range(7)]
    assert last_third(values).flatten().tolist() == [5, 6]
    assert last_third(values[:2]).flatten().tolist() == [1]
