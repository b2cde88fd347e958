"""Mixture-density regression."""

from __future__ import annotations

import pytest
import torch
from torch.distributions import Categorical, Independent, MixtureSameFamily, Normal

from hf_bayes.uncertainty.custom.mixture_density import MixtureDensity
from tests.uncertainty.custom.cases import case


def test_density_and_moments_are_those_of_the_mixture() -> None:
    likelihood, outputs, labels = case("mixture density of two")
    own = likelihood.config
    assert isinstance(own, MixtureDensity)
    log_weights, means, stds = own.components(outputs)
    parts = Independent(Normal(means, stds), 1)
    expected = MixtureSameFamily(Categorical(logits=log_weights), parts)
    # float64 sums in another order
    assert torch.allclose(own.log_prob(outputs, labels), expected.log_prob(labels), atol=1e-12)
    mean, variance = own.predict(outputs)
    assert torch.allclose(mean, expected.mean, atol=1e-12)
    assert torch.allclose(variance, expected.variance, atol=1e-12)


def test_the_order_of_outputs_is_weights_means_deviations() -> None:
    own = MixtureDensity(num_components=2)
    log_weights, means, stds = own.components(torch.tensor([0.0, 0.0, 5.0, 6.0, 0.0, 1.0]))
    assert log_weights.exp().tolist() == pytest.approx([0.5, 0.5])
    assert means.flatten().tolist() == [5.0, 6.0]
    assert stds.flatten().log().tolist() == pytest.approx([0.0, 1.0])


def test_a_collapsed_component_has_no_likelihood() -> None:
    own = MixtureDensity(num_components=2, min_std=0.01)
    outputs = torch.tensor([[0.0, 0.0, 0.0, 0.0, 0.0, -4.7], [0.0, 0.0, 0.0, 0.0, 0.0, -4.5]])  # exp(-4.6) = 0.01
    assert own.log_prob(outputs, torch.zeros(2)).isnan().tolist() == [True, False]
    assert "min_std" in own.advice


@pytest.mark.parametrize("fields", [{"num_components": 0}, {"num_components": 2, "min_std": -1.0}])
def test_impossible_settings_are_refused(fields: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="mixture_density"):
        MixtureDensity(**fields)  # type: ignore[arg-type]
