"""The features of tokens, whose cosines are correlations of noise."""

from __future__ import annotations

import torch

from hf_bayes.models.single_pass.token_correlation import NUM_FEATURES, blended, chosen, compressed, position_dim, unit
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


def test_features_follow_the_chosen_rows_and_positions() -> None:
    features, whole, rows = normal(2, 5, 3), slice(None), torch.tensor([1, 0])
    assert [position_dim(features, shape) for shape in ((2, 5, 8), (2, 4, 5, 8), (2, 5, 4, 8))] == [1, 2, 1]
    assert position_dim(features, (3, 2, 4, 5, 8)) is None
    kept = chosen(features, (2, 4, 5, 8), [whole, whole, slice(-3, None), whole], (2, 4, 3, 8))
    assert kept is not None
    assert torch.equal(kept, features[:, -3:])
    turned = chosen(features, (2, 4, 5, 8), [rows, whole, whole, whole], (2, 4, 5, 8))
    assert turned is not None
    assert torch.equal(turned, features.flip(0))
    assert chosen(features, (2, 4, 5, 8), [whole, whole, 0, whole], (2, 4, 8)) is None
