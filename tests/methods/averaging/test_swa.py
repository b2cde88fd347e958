from __future__ import annotations

import pytest
import torch

from hf_bayes.chains.sampling import SampleResult, sample
from hf_bayes.methods.averaging.map import MAPConfig
from hf_bayes.methods.averaging.swa import SWAConfig
from tests.methods.averaging.regression import BATCHES, CHAINS, RATE, START, N, energy, torch_sgd


def run(config: SWAConfig, *, num_steps: int = 41, burn_in: int = 10) -> SampleResult:
    return sample(
        energy, START, config, num_steps=num_steps, learning_rate=RATE, num_data=N, batches=BATCHES, burn_in=burn_in
    )


@pytest.mark.parametrize(("collect_every", "interval"), [(None, 1), (1, 1), (3, 3)])
def test_a_chain_ends_in_the_mean_of_the_iterates_of_torch_sgd(collect_every: int | None, interval: int) -> None:
    result = run(SWAConfig(optimizer="sgd", momentum=0.8, collect_every=collect_every))
    path = torch_sgd(41, momentum=0.8)
    collected = path[10 + interval - 1 :: interval]
    theta = result.approximation.sample(CHAINS)
    assert (theta - collected.mean(0)).abs().max() < 1e-12
    assert (theta - path[9 + interval - 1 : -1 : interval].mean(0)).abs().max() > 1e-3  # the twin: an update early
    assert (result.state.iterate_theta - path[-1]).abs().max() < 1e-12


def test_the_iterates_are_by_default_those_of_adamw() -> None:
    result = run(SWAConfig(momentum=0.8, collect_every=3))
    path = [sample_map(steps, momentum=0.8) for steps in range(13, 42, 3)]
    assert (result.approximation.sample(CHAINS) - torch.stack(path).mean(0)).abs().max() < 1e-12
    assert (path[0] - torch_sgd(13, momentum=0.8)[-1]).abs().max() > 1e-3  # the twin: SGD
    with pytest.raises(ValueError, match="swa: measure_gradient_noise=True reports the temperature"):
        SWAConfig(measure_gradient_noise=True)


def sample_map(num_steps: int, *, momentum: float) -> torch.Tensor:
    config = MAPConfig(momentum=momentum, num_chains=CHAINS)
    found = sample(energy, START, config, num_steps=num_steps, learning_rate=RATE, num_data=N, batches=BATCHES)
    return found.approximation.sample(CHAINS)


def test_by_default_about_a_hundred_iterates_are_averaged() -> None:
    result = run(SWAConfig(optimizer="sgd", momentum=0.8), num_steps=265, burn_in=5)
    expected = torch_sgd(265, momentum=0.8)[5 + 2 - 1 :: 2].mean(0)
    assert (result.approximation.sample(CHAINS) - expected).abs().max() < 1e-12


def test_before_the_first_collection_it_equals_sgd() -> None:
    draws = run(SWAConfig(optimizer="sgd", momentum=0.8, collect_every=30), burn_in=5).draws
    path = torch_sgd(41, momentum=0.8)
    assert (draws[:, :30] - path[5:35].transpose(0, 1)).abs().max() < 1e-12  # draws begin after burn-in
    assert torch.equal(draws[:, 30:], draws[:, 29:30].expand(-1, 6, -1))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"draws_per_chain": 2}, "swa: draws_per_chain must be 1, got 2: a chain ends in one average"),
        ({"collect_every": 0}, "swa: collect_every must be an integer >= 1, got 0"),
        ({"collect_every": 32}, "swa would collect 0 iterates, at least 1 are needed: 31 updates after burn-in"),
    ],
)
def test_runs_that_end_in_no_average_are_refused(fields: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(SWAConfig(**fields))  # type: ignore[arg-type]
