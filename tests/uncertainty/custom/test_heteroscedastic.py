"""Regression with a mean and a variance for each input."""

from __future__ import annotations

import math

import pytest
import torch
from torch.distributions import Normal

from hf_bayes.uncertainty.custom.heteroscedastic import Heteroscedastic
from tests.uncertainty.custom.cases import case


@pytest.mark.parametrize("name", ["heteroscedastic", "heteroscedastic of two"])
def test_the_density_is_normal(name: str) -> None:
    likelihood, outputs, labels = case(name)
    mean, log_variance = outputs.chunk(2, -1)
    expected = Normal(mean, (log_variance.exp() + 1e-6).sqrt()).log_prob(labels.view(mean.shape)).sum(-1)
    # float64 sums in another order
    assert torch.allclose(likelihood.config.log_prob(outputs, labels), expected, atol=1e-12)


def test_the_smallest_deviation_bounds_the_density() -> None:
    own = Heteroscedastic(min_std=0.1)
    assert float(own.log_prob(torch.tensor([[0.0, -1e3]]), torch.zeros(1))) == pytest.approx(own.max_log_prob())
    assert own.max_log_prob() == pytest.approx(-math.log(0.1) - 0.5 * math.log(2 * math.pi))


@pytest.mark.parametrize("fields", [{"num_numbers": 0}, {"min_std": 0.0}, {"min_std": math.nan}])
def test_impossible_settings_are_refused(fields: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(fields))):
        Heteroscedastic(**fields)  # type: ignore[arg-type]
