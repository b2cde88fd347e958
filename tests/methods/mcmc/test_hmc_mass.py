"""The mass that HMC learns in burn-in."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_bayes.chains.sampling import SampleResult, sample
from hf_bayes.diagnostics.convergence import ess
from hf_bayes.methods.mcmc.hmc import HMCConfig, mass_windows
from tests.methods.mcmc.targets import STRETCHED, starts, stretched


def run_stretched(**changes: Any) -> SampleResult:
    config = HMCConfig(num_leapfrog=8, **changes)
    theta = starts(16, dim=4) * STRETCHED
    return sample(stretched, theta, config, num_steps=600, learning_rate=0.1, burn_in=400, seed=1)


def test_windows_of_the_mass_are_those_of_stan() -> None:
    assert mass_windows(1000) == (75, 100, 150, 250, 450, 950)  # 75 | 25 50 100 200 500 | 50
    assert mass_windows(150) == (75, 100)
    assert mass_windows(100) == (15, 90)
    assert mass_windows(19) == ()


@pytest.mark.statistics
def test_the_mass_is_the_variance_of_each_coordinate() -> None:
    state = run_stretched().state
    ratio = (state.scale / STRETCHED).log()
    # the last window has 150 positions: at an ESS of 50 a standard deviation is good to 10 %, here to four of them; the
    # pull of 5 in 155 is 11 % of the outermost scales, which lie 30 times from the mean one
    assert ratio.abs().max() < 0.5
    without = run_stretched(adapt_mass=False).state
    assert torch.equal(without.scale, torch.ones_like(without.scale))


@pytest.mark.statistics
def test_a_mass_makes_stretched_laws_mix() -> None:
    with_mass, without = (run_stretched(adapt_mass=adapt).draws for adapt in (True, False))
    assert ess(with_mass).min() > 500  # of 16 x 200
    assert ess(without).min() < 100  # the twin: 8 steps of the narrowest scale do not cross the widest
