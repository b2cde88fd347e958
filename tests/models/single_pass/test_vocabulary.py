"""Probabilities and uncertainties of words against draws of their logits."""

from __future__ import annotations

import pytest
import torch

from hf_bayes.models.single_pass.vocabulary import GaussianWords, word_prediction
from hf_bayes.uncertainty.decomposition import predict
from hf_bayes.uncertainty.gaussian_links import predict_by_bridge
from hf_bayes.uncertainty.likelihoods import Categorical
from tests.models.single_pass.cases import normal

WORDS, WIDTH = 500, 32


@pytest.mark.parametrize("size", [0.02, 0.1])
def test_words_have_the_uncertainty_of_draws(size: float) -> None:
    weight = normal(WORDS, WIDTH) * 0.5
    mean, spread = weight @ normal(WIDTH, seed=1), size**2 * normal(WIDTH, seed=2).square()
    probs = mean.softmax(-1)
    product = weight @ (spread * (probs @ weight))
    found = word_prediction(mean[None], (weight.square() @ spread)[None], product[None], probs[None])
    draws = mean + (normal(20_000, WIDTH, seed=3) * spread.sqrt()) @ weight.mT
    expected = predict(draws[:, None])
    assert abs(found.uncertainty.epistemic / expected.uncertainty.epistemic - 1) < 0.1  # third order in the size
    assert (found.log_probs.exp() - expected.log_probs.exp()).abs().max() < 0.005
    covariance = (weight * spread) @ weight.mT
    bridge = predict_by_bridge(mean[None, None], covariance[None, None]).epistemic
    assert bridge is not None
    assert bridge < 0.9 * expected.uncertainty.epistemic


def test_no_variance_is_the_softmax() -> None:
    mean, zero = normal(2, WORDS), torch.zeros(2, WORDS, dtype=torch.float64)
    found = word_prediction(mean, zero, zero, mean.softmax(-1))
    assert (found.log_probs - mean.log_softmax(-1)).abs().max() < 1e-12
    assert not found.uncertainty.epistemic.any()


def test_epistemic_stays_below_the_total() -> None:
    mean, wide = normal(3, 5), 1e3 * normal(3, 5, seed=1).square()
    probs = mean.softmax(-1)
    found = word_prediction(mean, wide, wide * probs, probs)
    parts = found.uncertainty
    assert bool((parts.epistemic <= parts.total).all())
    assert bool((parts.aleatoric >= 0).all())
    assert torch.equal(parts.total, parts.aleatoric + parts.epistemic)
    words = GaussianWords(found, Categorical(), 2.0)
    assert torch.equal(words.members[1][0], words.logits)
