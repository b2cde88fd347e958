"""Preferences between two texts."""

from __future__ import annotations

import pytest
import torch

from hf_bayes.uncertainty.custom.bradley_terry import BradleyTerry
from hf_bayes.uncertainty.likelihoods import Categorical


def test_the_probability_is_the_sigmoid_of_the_difference() -> None:
    rewards = torch.randn(2, 5, 2, dtype=torch.float64)
    likelihood = BradleyTerry().build(1, Categorical)
    first = likelihood.log_prob(rewards, torch.zeros(2, 5, dtype=torch.long))
    # float64 sums in another order
    assert torch.allclose(first, torch.nn.functional.logsigmoid(rewards[..., 0] - rewards[..., 1]), atol=1e-14)
    second = likelihood.log_prob(rewards, torch.ones(2, 5, dtype=torch.long))
    assert torch.allclose(first.exp() + second.exp(), torch.ones(2, 5, dtype=torch.float64))


def test_labels_name_one_of_two_texts() -> None:
    likelihood = BradleyTerry().build(1, Categorical)
    assert likelihood.outside(torch.tensor([0, 1, 2, -100]), 1).tolist() == [False, False, True, False]
    assert likelihood.label_shapes((4, 2)) == ((4,),)
    assert likelihood.label_shapes((4, 1)) == ()


def test_a_head_of_several_outputs_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a model with one output, the reward of a text, got 3"):
        BradleyTerry().build(3, Categorical)
