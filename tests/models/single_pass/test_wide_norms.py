"""Norms of wide inputs against Monte Carlo, and of narrow inputs against the derivative."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hf_bayes.models.single_pass.wide_norms import expected_rate, norm_tangents
from tests.models.single_pass.cases import DOUBLE, normal

WIDTH, NUM_DRAWS = 32, 20_000
GAIN = normal(WIDTH, seed=2)


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("size", [0.01, 1.0, 3.0])
def test_variances_of_wide_inputs_are_those_of_draws(size: float, centred: bool) -> None:
    mean, columns = normal(WIDTH), size * normal(12, WIDTH, seed=1) / 12**0.5
    draws = mean + normal(NUM_DRAWS, 12, seed=3) @ columns

    def norm(x: torch.Tensor) -> torch.Tensor:
        if centred:
            return nn.functional.layer_norm(x, (WIDTH,), GAIN)
        return nn.functional.rms_norm(x, (WIDTH,), GAIN, 1e-5)

    expected = norm(draws).var(0).sum()
    found = norm_tangents(mean, columns, GAIN, 1e-5, centred=centred).square().sum()
    derivative = torch.func.jacrev(norm)(mean) @ columns.mT
    assert 0.97 < found / expected < 1.25  # an upper bound, less 3 standard errors of the draws
    if size > 1:
        assert derivative.square().sum() / expected > 2  # the derivative at the mean, which this rule replaces
    if size < 1:
        assert abs(found / derivative.square().sum() - 1) < 0.01


def test_the_scale_is_the_same_by_either_product() -> None:
    mean, columns = normal(3, 8), normal(6, 3, 8, seed=1)
    more = torch.cat([columns, torch.zeros(4, 3, 8, dtype=DOUBLE)])  # more columns than units
    assert (expected_rate(mean, columns, 0.0) - expected_rate(mean, more, 0.0)).abs().max() < 1e-14
