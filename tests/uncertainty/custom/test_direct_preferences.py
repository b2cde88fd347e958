"""Preferences between two answers of a language model."""

from __future__ import annotations

import pytest
import torch

from hf_bayes.uncertainty.custom.direct_preferences import DirectPreferences
from hf_bayes.uncertainty.likelihoods import Categorical


def test_the_likelihood_is_that_of_a_difference_of_rewards() -> None:
    rewards = torch.tensor([[[1.5, -0.5], [0.25, 0.75]]], dtype=torch.float64)
    found = DirectPreferences(beta=0.3).of_rewards().log_prob(rewards, torch.tensor([[0, 1]]))
    expected = torch.nn.functional.logsigmoid(torch.tensor([2.0, 0.5], dtype=torch.float64))
    assert torch.allclose(found[0], expected, atol=1e-14)  # a few roundings of float64


def test_settings_are_stored_under_a_key_of_their_own() -> None:
    config = DirectPreferences(beta=0.3)
    assert config.stored_as == "preferences"
    assert config.to_dict() == {"name": "direct_preferences", "beta": 0.3, "reference": "start"}


@pytest.mark.parametrize("beta", [0.0, -0.1])
def test_a_beta_that_is_not_positive_is_refused(beta: float) -> None:
    with pytest.raises(ValueError, match=rf"beta must be > 0, got {beta}"):
        DirectPreferences(beta=beta)


def test_a_model_without_answers_is_refused() -> None:
    with pytest.raises(ValueError, match=r"of the answers of a causal language model, got a model with 3 outputs"):
        DirectPreferences().build(3, Categorical)
