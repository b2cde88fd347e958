"""Norms of wide inputs against Monte Carlo, of narrow inputs against the derivative, and of one norm behind another."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from hf_bayes.models.single_pass.second_order import with_drift
from hf_bayes.models.single_pass.wide_norms import norm_columns, trace_of_square
from tests.models.single_pass.cases import DOUBLE, normal

WIDTH, NUM_DRAWS = 32, 20_000
GAIN = normal(WIDTH, seed=2)
SIZES = (0.01, 1.0, 3.0)


def norm_of(centred: bool) -> Callable[[Tensor], Tensor]:
    if centred:
        return lambda x: nn.functional.layer_norm(x, (WIDTH,), GAIN)
    return lambda x: nn.functional.rms_norm(x, (WIDTH,), GAIN, 1e-5)


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_variances_of_wide_inputs_are_those_of_draws(size: float, centred: bool) -> None:
    mean, columns, norm = normal(WIDTH), size * normal(12, WIDTH, seed=1) / 12**0.5, norm_of(centred)
    expected = norm(mean + normal(NUM_DRAWS, 12, seed=3) @ columns).var(0).sum()
    found = norm_columns(mean, with_drift(columns), GAIN, 1e-5, centred=centred)[:-1].square().sum()
    derivative = torch.func.jacrev(norm)(mean) @ columns.mT
    assert abs(found / expected - 1) < 0.04  # 3 standard errors of the draws, and the fourth order
    if size > 1:
        assert derivative.square().sum() / expected > 2  # the derivative at the mean, which this rule replaces
    if size < 1:
        assert abs(found / derivative.square().sum() - 1) < 0.01


@pytest.mark.parametrize("centred", [False, True])
def test_a_drift_of_the_input_moves_columns_and_mean(centred: bool) -> None:
    mean, columns, norm = normal(WIDTH), normal(12, WIDTH, seed=1) / 12**0.5, norm_of(centred)
    drift = normal(WIDTH, seed=5)
    found = norm_columns(mean, with_drift(columns, drift), GAIN, 1e-5, centred=centred)
    there = norm_columns(mean + drift, with_drift(columns), GAIN, 1e-5, centred=centred)
    assert (found[:-1] - there[:-1]).abs().max() < 1e-12
    assert (norm(mean) + found[-1] - norm(mean + drift) - there[-1]).abs().max() < 1e-12


@pytest.mark.parametrize("centred", [False, True])
def test_the_mean_shrinks_with_the_noise(centred: bool) -> None:
    """The output of a norm has the mean square D, in every draw: E|y|^2 = |E y|^2 + tr Cov y = D."""
    mean, columns = normal(WIDTH), normal(400, WIDTH, seed=1) / 20
    found = norm_columns(mean, with_drift(columns), None, 0.0, centred=centred)
    plain = nn.functional.layer_norm(mean, (WIDTH,), eps=0.0) if centred else nn.functional.rms_norm(mean, (WIDTH,))
    noise = float(found[:-1].square().sum()) / WIDTH
    assert abs(float((plain + found[-1]).square().mean()) + noise - 1) < 1e-12
    assert float(plain.square().mean()) + noise > 1.4  # the mean without its drift


def test_the_trace_is_the_same_by_either_product() -> None:
    columns = normal(6, 3, 8, seed=1)
    more = torch.cat([columns, torch.zeros(4, 3, 8, dtype=DOUBLE)])  # more columns than units
    assert torch.allclose(trace_of_square(columns, shared=6), trace_of_square(more), rtol=1e-12)


@pytest.mark.parametrize("shared", [0, 2])
def test_a_trace_of_draws_has_no_bias(shared: int) -> None:
    roots = normal(16, 16, seed=2) / 4
    known = normal(2, 16, seed=3)[:shared]
    covariance = roots.mT @ roots + known.mT @ known
    drawn = normal(8, 4000, 16, seed=4) @ roots / 8**0.5
    found = trace_of_square(torch.cat([known[:, None].expand(-1, 4000, -1), drawn]), shared).mean()
    assert abs(found / covariance.square().sum() - 1) < 0.03  # 4 standard errors
    assert trace_of_square(drawn, shared=8).mean() / (roots.mT @ roots).square().sum() > 1.5  # all pairs count
