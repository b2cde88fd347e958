"""The features of tokens, whose cosines are correlations of noise."""

from __future__ import annotations

import torch

from hf_bayes.models.single_pass.token_correlation import NUM_FEATURES, blended, compressed, unit
from tests.models.single_pass.cases import normal


def cosines(features: torch.Tensor) -> torch.Tensor:
    return unit(features) @ unit(features).mT


def test_few_features_are_kept_exactly() -> None:
    features = normal(6, 5)
    assert (cosines(compressed(features)) - cosines(features)).abs().max() < 1e-12


def test_many_features_are_projected() -> None:
    features = normal(20, 400) + 2 * normal(1, 400, seed=1)
    error = cosines(compressed(features)) - cosines(features)
    assert error.square().mean().sqrt() < 1 / NUM_FEATURES**0.5  # of a random projection, by its own error bound
    assert compressed(features).norm(dim=-1).sub(1).abs().max() < 1e-12


def test_equal_noises_with_equal_features_stay_correlated() -> None:
    features = unit(normal(1, 4, 3)[..., :1].expand(1, 4, NUM_FEATURES))
    variance = torch.ones(1, 4, 2, dtype=features.dtype)
    found = blended([(variance, features)])
    assert found is not None
    assert (cosines(found) - cosines(features)).abs().max() < 1e-12
    assert blended([(variance, features), (variance, None)]) is None


def test_no_noise_has_features_of_length_one() -> None:
    assert torch.equal(unit(torch.zeros(2, 3)).norm(dim=-1), torch.ones(2))
