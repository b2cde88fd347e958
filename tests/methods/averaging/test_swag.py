from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_bayes.chains.sampling import SampleResult, sample
from hf_bayes.core.rng import generator
from hf_bayes.distributions.approximations import Gaussian
from hf_bayes.distributions.covariance import dense
from hf_bayes.methods.assembly import assemble
from hf_bayes.methods.averaging.swag import IterateMoments, SWAGConfig
from tests.methods.averaging.regression import BATCHES, CHAINS, DIM, RATE, START, N, energy, torch_sgd
from tests.methods.conformance import problem
from tests.objectives.test_curvature_memory import peak

INTERVAL, BURN_IN, NUM_STEPS = 3, 10, 60


def run(rank: int) -> SampleResult:
    config = SWAGConfig(optimizer="sgd", momentum=0.8, collect_every=INTERVAL, rank=rank)
    return sample(
        energy, START, config, num_steps=NUM_STEPS, learning_rate=RATE, num_data=N, batches=BATCHES, burn_in=BURN_IN
    )


def collected() -> Tensor:
    """Return the iterates, [n, M, d]."""
    return torch_sgd(NUM_STEPS, momentum=0.8)[BURN_IN + INTERVAL - 1 :: INTERVAL]


def by_definition(iterates: Tensor, rank: int) -> Tensor:
    """Return the covariance [d, d] of iterates [n, d] as the paper writes it: (S + D D' / (K - 1)) / 2."""
    count = len(iterates)
    variance = iterates.square().mean(0) - iterates.mean(0).square()
    running = iterates.cumsum(0) / torch.arange(1, count + 1)[:, None]
    deviations = (iterates - running)[-rank:]
    return 0.5 * (torch.diag(variance) + deviations.T @ deviations / (len(deviations) - 1))


@pytest.mark.parametrize("rank", [2, 4, 12, 30])  # 16 iterates: fewer than the last
def test_moments_are_those_of_the_iterates_of_torch_sgd(rank: int) -> None:
    gaussian, iterates = run(rank).approximation, collected()
    assert isinstance(gaussian, Gaussian)
    assert (gaussian.means - iterates.mean(0)).abs().max() < 1e-12
    for chain, covariance in enumerate(gaussian.covariances):
        expected = by_definition(iterates[:, chain], rank)
        assert torch.allclose(dense(covariance, expected), expected, rtol=1e-9, atol=1e-12 * float(expected.max()))
        wrong = by_definition(iterates[:, chain], rank + 1 if rank < 16 else 15)  # the twin: one deviation off
        assert not torch.allclose(dense(covariance, expected), wrong, rtol=1e-3)


def test_the_gaussian_copies_the_deviations_of_one_chain() -> None:
    """A run of many parameters must not run out of memory after its last update."""
    chains, rank, dim = 3, 20, 1 << 16
    moments = IterateMoments(torch.zeros(chains, dim), torch.ones(chains, dim), torch.ones(chains, rank, dim))
    one = (rank + 2) * dim * moments.mean.element_size()  # a Gaussian, or the deviations with small tensors beside them
    assert peak(lambda: moments.gaussian(40)) <= (chains + 1) * one


def test_samples_have_that_mean_and_covariance() -> None:
    gaussian, count = run(4).approximation, 20_000
    draws = gaussian.sample(count * CHAINS, generator("members"))[::CHAINS] - collected()[:, 0].mean(0)
    expected = by_definition(collected()[:, 0], 4)
    variance = torch.outer(expected.diagonal(), expected.diagonal()) + expected**2
    errors = [
        ((draws.T @ draws / count - factor * expected).abs() / (variance / count).sqrt()).max() for factor in (1, 2)
    ]
    assert errors[0] < 4.5  # standard errors, the largest of 25
    assert errors[1] > 4.5  # the broken twin: the half forgotten
    assert ((draws.mean(0)).abs() / (expected.diagonal() / count).sqrt()).max() < 4.5


def test_the_draws_of_any_method_can_be_fitted() -> None:
    draws = collected()[:, 1]
    fitted, ran = SWAGConfig(rank=4).through(draws), run(4).approximation
    assert isinstance(ran, Gaussian)
    assert torch.allclose(fitted.means[0], ran.means[1], rtol=1e-12)
    expected = dense(ran.covariances[1], draws)
    assert torch.allclose(dense(fitted.covariances[0], draws), expected, rtol=1e-9, atol=1e-12)
    with pytest.raises(ValueError, match=r"draws must be \[S >= 2, d\], got \[1, 5\]"):
        SWAGConfig().through(draws[:1])


def test_small_variances_keep_their_digits_in_float32() -> None:
    draws = 1 + 1e-4 * torch.randn(500, DIM, generator=generator("small"))
    moments = IterateMoments.none(draws[:1], 2)
    for count, draw in enumerate(draws.split(1), start=1):
        moments = moments.collect(draw, count)
    exact = draws.double().var(0, correction=0)
    assert torch.allclose(moments.squares[0].double() / 500, exact, rtol=0.01)  # 1 + 1e-4 has 3 digits after the 1
    assert not torch.allclose((draws.square().mean(0) - draws.mean(0).square()).double(), exact, rtol=0.1)


def test_a_still_run_has_no_spread_and_a_short_one_is_refused() -> None:
    still = SWAGConfig().through(torch.ones(5, 3))
    assert float(still.sample(4, generator(0)).sub(1).abs().max()) < 1e-6
    with pytest.raises(ValueError, match="swag would collect 1 iterates, at least 2 are needed: 5 updates after"):
        assemble(SWAGConfig(collect_every=3), problem())
    with pytest.raises(ValueError, match="swag: rank must be an integer >= 2, got 1"):
        SWAGConfig(rank=1)
