"""Counts."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats

from hf_bayes.uncertainty.custom.poisson import Poisson
from tests.uncertainty.custom.cases import case


def test_the_density_is_that_of_torch() -> None:
    likelihood, outputs, labels = case("poisson of two")
    expected = torch.distributions.Poisson(outputs.exp()).log_prob(labels).sum(-1)
    # float64 sums in another order
    assert torch.allclose(likelihood.config.log_prob(outputs, labels), expected, atol=1e-12)


@pytest.mark.parametrize("rate", [0.01, 1.0, 7.5, 3000.0])
def test_draws_invert_the_distribution_function(rate: float) -> None:
    uniforms = torch.linspace(0.001, 0.999, 97, dtype=torch.float64)
    outputs = torch.full((97, 1), math.log(rate), dtype=torch.float64)
    assert Poisson().draw(outputs, uniforms).tolist() == stats.poisson.ppf(uniforms.numpy(), rate).tolist()


def test_only_whole_numbers_from_zero_are_counts() -> None:
    labels = torch.tensor([0.0, 3.0, -1.0, 1.5, math.nan])
    assert Poisson().outside(labels).tolist() == [False, False, True, True, True]


def test_a_number_of_counts_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="num_counts must be an integer >= 1"):
        Poisson(num_counts=0)
