"""Linearised activations and gates against derivatives and Monte Carlo."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hf_bayes.models.single_pass.activations import derivative, elementwise, product_variance
from tests.models.single_pass.cases import covariance_matrix, normal


@pytest.mark.parametrize("function", [torch.relu, torch.tanh, nn.functional.gelu, nn.functional.silu])
def test_activation_has_the_variance_of_draws(function: object) -> None:
    mean, covariance = normal(6), 1e-4 * covariance_matrix(6)
    draws = mean + normal(100_000, 6, seed=1) @ torch.linalg.cholesky(covariance).mT
    expected = torch.cov(function(draws).mT)  # type: ignore[operator]
    found = elementwise(mean[None], covariance[None], function)[1][0]  # type: ignore[arg-type]
    scale = (covariance.diagonal()[:, None] * covariance.diagonal()).sqrt()
    assert ((found - expected) / scale).abs().max() < 0.03  # 5 standard errors of 1e5 draws, and curvature
    assert ((covariance - expected) / scale).abs().max() > 0.03  # without the slope


def test_the_diagonal_follows_the_rule_for_independent_units() -> None:
    mean, covariance = normal(2, 6), covariance_matrix(6).expand(2, 6, 6)
    found = elementwise(mean, covariance, torch.tanh)[1].diagonal(dim1=1, dim2=2)
    assert (found - elementwise(mean, covariance.diagonal(dim1=1, dim2=2), torch.tanh)[1]).abs().max() < 1e-14


def test_slope_is_the_derivative() -> None:
    x = normal(7)
    assert (derivative(torch.tanh, x) - (1 - x.tanh().square())).abs().max() < 1e-14


def test_gate_has_the_variance_of_a_product() -> None:
    x, y = 1 + 0.5 * normal(400_000), 2 + 0.3 * normal(400_000, seed=1)
    one = torch.ones(1, dtype=x.dtype)
    found = product_variance(one, 0.25 * one, 2 * one, 0.09 * one)
    assert (found / (x * y).var() - 1).abs() < 0.015  # 5 standard errors: sqrt(2 / 4e5) each, heavier tails
    assert ((0.09 + 4 * 0.25) / (x * y).var() - 1).abs() > 0.015  # without the product of variances
