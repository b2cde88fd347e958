"""Independence of the random streams of chains, within a run and between runs with other seeds (F13)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_bayes.chains.sampling import sample
from hf_bayes.core.rng import MAX_SEED, chain_generators, generator, rand, randn, require_seed
from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from tests import runs

CHAINS, LENGTH = 4, 1 << 18
SHARED = (4605, 1774, 1884)
"""A seed for which two chains have the same CPU generator; found by search."""


def streams(tmp_path: Path) -> Tensor:
    """Return the random numbers [8, n] of the chains of two trainers with successive seeds."""
    rows = []
    for seed in (42, 43):
        trainer = runs.trainer(tmp_path, SGHMCConfig(num_chains=CHAINS), seed=seed)
        rows += [torch.randn(LENGTH, generator=rng) for rng in runs.started(trainer).run.rngs]
    return torch.stack(rows).double()


def largest_correlations(noise: Tensor) -> tuple[float, float]:
    """Return the largest correlations of two rows at the same time and at any lag, in standard errors of 1/sqrt(n)."""
    scaled = (noise - noise.mean(1, keepdim=True)) / noise.std(1, keepdim=True)
    spectra = torch.fft.rfft(scaled)
    at_once, at_any_lag = 0.0, 0.0
    for one, other in itertools.combinations(range(len(noise)), 2):
        lags = torch.fft.irfft(spectra[one] * spectra[other].conj(), n=noise.shape[1]) / math.sqrt(noise.shape[1])
        at_once, at_any_lag = max(at_once, float(lags[0].abs())), max(at_any_lag, float(lags.abs().max()))
    return at_once, at_any_lag


@pytest.mark.reliability("F13")
def test_noise_of_chains_and_seeds_is_uncorrelated_at_every_lag(
    tmp_path: Path, injected: Callable[[int], None]
) -> None:
    injected(28)  # pairs
    at_once, at_any_lag = largest_correlations(streams(tmp_path))
    assert at_once < 4
    # the largest of 28 pairs x 2^18 lags: a normal exceeds 6.5 with probability 8e-11, 6e-4 for any of them
    assert at_any_lag < 6.5


@pytest.mark.reliability("F13", twin=True)
def test_chains_with_a_shared_or_shifted_stream_are_caught() -> None:
    one = torch.randn(LENGTH + 1000, generator=torch.Generator().manual_seed(0)).double()
    assert largest_correlations(torch.stack([one[:LENGTH], one[:LENGTH]]))[0] > 4
    assert largest_correlations(torch.stack([one[:LENGTH], one[1000:]]))[1] > 6.5


def start_trainer(tmp_path: Path, seed: int, num_chains: int) -> None:
    runs.started(runs.trainer(tmp_path, SGHMCConfig(num_chains=num_chains), seed=seed))


def start_sampling(tmp_path: Path, seed: int, num_chains: int) -> None:
    theta, method = torch.zeros(num_chains, 2), SGHMCConfig(num_chains=num_chains)
    sample(lambda theta, batch: theta.sum(1), theta, method, num_steps=2, learning_rate=0.1, num_data=1, seed=seed)


@pytest.mark.reliability("F13")
@pytest.mark.parametrize("start", [start_trainer, start_sampling])
def test_two_chains_with_one_stream_are_refused(tmp_path: Path, start: Callable[..., None]) -> None:
    seed, one, other = SHARED
    with pytest.raises(ValueError, match=f"chains {one} and {other} .* the same random numbers.* choose another seed"):
        start(tmp_path, seed, other + 1)


def test_that_seed_does_give_two_chains_one_stream() -> None:
    """The generators of the two chains agree; otherwise the refusal would be pointless."""
    seed, one, other = SHARED
    first, second = (torch.randn(100, generator=generator(seed, "chain", chain)) for chain in (one, other))
    assert torch.equal(first, second)
    assert len(chain_generators(seed, other)) == other


@pytest.mark.parametrize("seed", [-1, 2**64, 1.5, "1", True])
def test_a_seed_that_generators_do_not_take_is_refused(seed: Any) -> None:
    require_seed(MAX_SEED)
    torch.Generator().manual_seed(MAX_SEED)
    with pytest.raises(ValueError, match=r"seed must be an integer from 0 to 2\*\*64 - 1"):
        require_seed(seed)


def test_every_second_mirrored_chain_has_the_opposite_normals() -> None:
    like = torch.zeros(3, 5)
    noise = randn(chain_generators(7, 3, mirrored=True), like)
    assert torch.equal(noise[1], -noise[0])
    assert torch.equal(noise[::2], randn(chain_generators(7, 3), like)[::2])  # the others are as they were
    assert torch.equal(noise[1:2], randn(chain_generators(7, 3, chains=range(1, 2), mirrored=True), like[:1]))


def test_uniforms_of_mirrored_chains_stay_between_0_and_1() -> None:
    assert bool((rand(chain_generators(7, 2, mirrored=True), torch.zeros(2)) >= 0).all())
