from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_bayes.chains.sampling import sample
from hf_bayes.core.rng import generator
from hf_bayes.methods.averaging.ensemble import EnsembleConfig
from hf_bayes.methods.averaging.map import MAPConfig


def double_well(theta: Tensor, batch: None) -> Tensor:
    return 5 * (theta.square() - 1).square().sum(1)


def test_its_members_are_the_map_runs_of_their_starts() -> None:
    start = torch.randn(3, 4, generator=generator("start"), dtype=torch.float64)
    together = sample(double_well, start, EnsembleConfig(), num_steps=100, learning_rate=0.02).approximation.sample(3)
    for member, theta in zip(together, start, strict=True):
        alone = sample(double_well, theta[None], MAPConfig(), num_steps=100, learning_rate=0.02).approximation
        assert torch.equal(alone.mean, member)


def test_over_dispersed_starts_find_several_modes() -> None:
    config = EnsembleConfig(num_chains=16, init_jitter=100.0)  # relative to 0.01: the centre is zero
    members = sample(double_well, torch.zeros(1), config, num_steps=500, learning_rate=0.05).approximation.sample(16)
    assert (members.abs() - 1).abs().max() < 1e-3
    assert set(members.sign().flatten().tolist()) == {-1.0, 1.0}


def test_members_that_start_apart_stay_apart() -> None:
    result = sample(double_well, torch.ones(8), EnsembleConfig(), num_steps=5, learning_rate=0.001)
    assert len(result.approximation.sample(4).unique(dim=0)) == 4


def test_it_refuses_a_temperature_by_its_own_name() -> None:
    with pytest.raises(ValueError, match=r"ensemble: temperature must be 0, got 1\.0"):
        EnsembleConfig(temperature=1.0)


def test_defaults_are_those_of_many_chains() -> None:
    assert (EnsembleConfig().num_chains, EnsembleConfig().init_jitter) == (4, 0.1)
    assert (MAPConfig().num_chains, MAPConfig().init_jitter) == (1, 0.0)
