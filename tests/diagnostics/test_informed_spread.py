"""The temperature where the data outweigh the prior, for Gaussian targets."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_bayes.diagnostics.informed_spread import InformedSpread, informed_spread

DIM, PRIOR_PRECISION = 40, 1.0


def problem() -> tuple[Tensor, Tensor]:
    """Return H [d, d] of rank 20 with correlated elements, and (H + tau)^-1."""
    rows = torch.randn(200, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    directions = torch.linalg.qr(torch.randn(DIM, 20, generator=torch.Generator().manual_seed(1)).double()).Q
    features = rows @ directions.T
    curvature = features.T @ features
    return curvature, torch.linalg.inv(curvature + PRIOR_PRECISION * torch.eye(DIM))


def measured(covariance: Tensor, *, error: float = 0.0, num_draws: int = 100) -> InformedSpread:
    """Return the spread of draws of N(0, covariance); all gradients have the same ``error``."""
    curvature, posterior = problem()
    noise = torch.randn(num_draws, DIM, generator=torch.Generator().manual_seed(2)).double()
    draws = noise @ torch.linalg.cholesky(covariance).T
    share = curvature @ posterior
    gradients = draws @ (curvature + PRIOR_PRECISION * torch.eye(DIM)) + error
    return informed_spread(draws @ share, gradients, float(share.trace()))


def test_draws_of_the_posterior_have_temperature_one() -> None:
    found = measured(problem()[1])
    assert abs(found.temperature - 1) < 4 * (2 / (100 * 20)) ** 0.5  # 4 standard errors: 20 directions, 100 draws
    assert 0.5 < found.std_error / (2 / (100 * 20)) ** 0.5 < 2


def test_a_posterior_twice_as_wide_has_temperature_two() -> None:
    found = measured(2 * problem()[1])
    assert abs(found.temperature - 2) < 4 * found.std_error


def test_a_diagonal_with_the_right_precisions_is_caught() -> None:
    """The broken twin: without correlations draws are too wide where the data outweigh the prior, else too narrow."""
    curvature, _ = problem()
    diagonal = (1 / (curvature.diagonal() + PRIOR_PRECISION)).diag()
    assert measured(diagonal).temperature > 1.3


def test_an_error_that_all_gradients_share_does_not_count() -> None:
    exact, shifted = (measured(problem()[1], error=error) for error in (0.0, 50.0))
    assert abs(exact.temperature - shifted.temperature) < 1e-9
