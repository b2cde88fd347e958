from __future__ import annotations

import pytest
import torch

from hf_bayes.distributions.approximations import Draws, Gaussian
from tests.distributions.covariance.structures import LAYOUT, kinds, make, numbers


@kinds
def test_a_mixture_matches_torch_distributions(kind: str) -> None:
    parts = [make(kind, seed) for seed in (0, 1)]
    gaussian = Gaussian(numbers(2, LAYOUT.dim), tuple(covariance for covariance, _ in parts))
    components = [
        torch.distributions.MultivariateNormal(mean, precision_matrix=precision)
        for mean, (_, precision) in zip(gaussian.means, parts, strict=True)
    ]
    theta = (0.1 * numbers(3, LAYOUT.dim, seed=5)).requires_grad_()
    expected = (
        torch.stack([component.log_prob(theta) for component in components]).logsumexp(0) - torch.tensor(2.0).log()
    )
    assert torch.allclose(gaussian.log_prob(theta), expected, rtol=1e-9)
    (grad,) = torch.autograd.grad(expected.sum(), theta)
    assert torch.allclose(gaussian.grad(theta), grad, rtol=1e-8, atol=1e-8)


def test_draws_and_mixtures_become_the_gaussian_of_their_moments() -> None:
    theta = torch.randn(50, 4, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 2.0, 3.0, 4.0]) + 1
    fitted = Draws(theta, torch.zeros(50, dtype=torch.int64)).single()
    assert torch.allclose(fitted.mean, theta.mean(0))
    assert torch.allclose(fitted.stds[0], theta.std(0))
    mixture = Gaussian.diagonal(torch.tensor([[0.0, 1.0], [2.0, 1.0]]), torch.tensor([[1.0, 1.0], [2.0, 3.0]]))
    assert torch.allclose(mixture.single().stds[0] ** 2, torch.tensor([2.5 + 1, 5.0]))
    assert fitted.single() is fitted


def test_draws_that_do_not_tell_a_variance_are_refused() -> None:
    with pytest.raises(ValueError, match="one draw has no variance"):
        Draws(torch.zeros(1, 3), torch.zeros(1, dtype=torch.int64)).single()
    with pytest.raises(ValueError, match="1 of 2 elements are the same in all 2 draws"):
        Draws(torch.tensor([[0.0, 1.0], [0.0, 2.0]]), torch.zeros(2, dtype=torch.int64)).single()
