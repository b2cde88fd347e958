from __future__ import annotations

import math

import pytest
import torch

from hf_bayes.core.rng import generator
from hf_bayes.core.types import Evaluation
from hf_bayes.distributions.energy import GaussianPrior, IndependentPrior, LaplacePrior, energy
from hf_bayes.distributions.priors import PRIORS
from tests.distributions.laws import LIMIT, kolmogorov_smirnov, laws


@pytest.mark.parametrize(("kind", "distribution"), [(GaussianPrior, "Normal"), (LaplacePrior, "Laplace")])
def test_density_and_gradient_are_those_of_torch_distributions(kind: type[IndependentPrior], distribution: str) -> None:
    mean = torch.randn(5, generator=generator("mean"), dtype=torch.float64)
    std = torch.rand(5, generator=generator("std"), dtype=torch.float64) + 0.1
    theta = torch.randn(3, 5, generator=generator("theta"), dtype=torch.float64).requires_grad_()
    scale = std / math.sqrt(2) if distribution == "Laplace" else std
    reference = getattr(torch.distributions, distribution)(mean, scale)
    assert torch.allclose(reference.stddev, std)
    expected = reference.log_prob(theta).sum(1)
    (gradient,) = torch.autograd.grad(expected.sum(), theta)
    prior = kind(mean, std)
    assert torch.allclose(prior.log_prob(theta), expected, rtol=1e-12)
    assert torch.allclose(prior.grad(theta), gradient, rtol=1e-12)
    scalar = kind(mean[0], std[0])  # one location and scale for all
    every = kind(mean[:1].expand(5), std[:1].expand(5))
    assert torch.allclose(scalar.log_prob(theta), every.log_prob(theta), rtol=1e-12)


@pytest.mark.parametrize("name", ["gaussian", "laplace"])
def test_draws_from_a_prior_have_its_law(name: str) -> None:
    prior = PRIORS[name](torch.tensor(0.0), torch.tensor(1.5))
    draws = prior.sample(100, 200, generator("draws"))
    other = next(law for kind, law in laws(1.5).items() if kind != name)
    assert kolmogorov_smirnov(draws, laws(1.5)[name]) < LIMIT
    assert kolmogorov_smirnov(draws, other) > LIMIT  # the broken twin has the same variance
    shifted = PRIORS[name](torch.tensor(4.0), torch.tensor(1.5)).sample(100, 200, generator("draws"))
    assert torch.allclose(shifted, draws + 4)


@pytest.mark.parametrize("kind", [GaussianPrior, LaplacePrior])
def test_kernels_compare_energies_of_many_parameters(kind: type[IndependentPrior]) -> None:
    prior, theta = kind(torch.tensor(0.0), torch.tensor(0.02)), torch.zeros(2, 1_000_000)
    theta[1, 0] = 0.002  # far less than float32 resolves in a sum of a million terms
    log_lik = torch.zeros(2, dtype=torch.float64)
    change = energy(Evaluation(log_lik, None), theta, prior).diff()
    expected = -prior.to(log_lik).log_prob(theta[:, :1].double()).diff()
    assert torch.allclose(change, expected, rtol=1e-5)
    assert energy(Evaluation(log_lik.float(), None), theta, prior).dtype == torch.float32
