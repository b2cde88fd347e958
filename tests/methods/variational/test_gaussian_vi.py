from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hf_bayes.core.rng import generator
from hf_bayes.core.types import Evaluation, Problem
from hf_bayes.distributions.approximations import Gaussian
from hf_bayes.distributions.covariance import log_normal
from hf_bayes.distributions.energy import FlatPrior, GaussianPrior, grad_energy
from hf_bayes.methods.variational.gaussian_vi import EnergyGradient, averaging_weight, gaussian_entropy, parts

CURVATURE = torch.tensor([2.0, 0.5, 7.0], dtype=torch.float64)


def pair(noise_of_batch: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return delta, and the gradients at mean + delta and mean - delta of a quadratic energy with a noisy slope."""
    delta = torch.randn(4, 3, generator=generator("delta"), dtype=torch.float64)
    return delta, CURVATURE * delta + noise_of_batch, -CURVATURE * delta + noise_of_batch


def test_the_odd_part_of_a_pair_is_free_of_the_batch_noise() -> None:
    delta, gradient, beside = pair(torch.full((4, 3), 5.0, dtype=torch.float64))
    linear = torch.zeros_like(delta)[:, None]
    even, odd = parts((gradient, beside), linear)
    torch.testing.assert_close(odd[:, 0], CURVATURE * delta)
    torch.testing.assert_close(even, torch.full_like(delta, 5.0))
    single = parts((gradient,), linear)[1][:, 0]
    assert (single - CURVATURE * delta).abs().min() > 4.9  # the twin: one draw keeps the noise


def test_the_linear_part_is_taken_from_the_parts_that_have_it() -> None:
    delta, gradient, beside = pair(torch.zeros(4, 3, dtype=torch.float64))
    even, odd = parts((gradient, beside), CURVATURE * delta[:, None])
    assert even.abs().max() == 0
    assert odd.abs().max() < 1e-14
    single_even, single_odd = parts((gradient,), CURVATURE * delta[:, None])
    assert max(single_even.abs().max(), single_odd.abs().max()) == 0


@pytest.mark.parametrize(("burn_in", "first"), [(0, 10), (15, 15)])
def test_the_average_begins_after_burn_in_or_in_the_middle(burn_in: int, first: int) -> None:
    problem = Problem(1, FlatPrior(), 0.1, 20, burn_in, {"": (1,)})
    average = 0.0
    for count in range(1, 21):
        average += averaging_weight(problem, count) * (count - average)
        expected = count if count <= first else sum(range(first + 1, count + 1)) / (count - first)
        assert average == pytest.approx(expected)


@pytest.mark.parametrize("independent", [True, False])
def test_gradients_by_column_are_the_gradient_of_the_energy(independent: bool) -> None:
    theta = torch.randn(2, 3, generator=generator("theta"), dtype=torch.float64)
    mean, std = torch.full((3,), 0.5, dtype=torch.float64), torch.full((3,), 0.8, dtype=torch.float64)
    prior = GaussianPrior(mean, std) if independent else Gaussian.diagonal(mean[None], std[None])
    of = EnergyGradient.of(2 * theta, prior, lambda: theta, weight=0.3)
    log_prior, gradient = of.at(theta, *of.tensors)
    evaluation = Evaluation(torch.zeros(2), 2 * theta)
    torch.testing.assert_close(gradient, grad_energy(evaluation, theta, prior, prior_weight=0.3))
    torch.testing.assert_close(of.log_prior + log_prior, prior.log_prob(theta))


def test_the_entropy_is_minus_the_mean_log_density() -> None:
    std = torch.tensor([0.5, 2.0, 3.0], dtype=torch.float64)
    q = Gaussian.diagonal(torch.zeros(1, 3, dtype=torch.float64), std[None])
    at_one_std = -log_normal(q.covariances[0], std)  # the mean square of a coordinate is its variance
    assert math.isclose(gaussian_entropy(std.log().sum(), 3), at_one_std)
