"""Weights of rows."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hf_bayes.uncertainty.custom.adapted import Adapted
from hf_bayes.uncertainty.custom.heteroscedastic import Heteroscedastic
from hf_bayes.uncertainty.custom.ordinal import Ordinal
from hf_bayes.uncertainty.custom.weighted import Weighted, WeightedRows
from hf_bayes.uncertainty.likelihoods import Categorical, Likelihood, Normal
from hf_bayes.uncertainty.several_labels import Bernoulli

HEADS: dict[str, tuple[Likelihood, Tensor]] = {
    "classes": (Categorical(), torch.tensor([2, 0, -100])),
    "numbers": (Normal(0.5), torch.tensor([[0.3], [1.0], [-1.0]])),
    "several numbers": (Normal(0.5), torch.randn(3, 2)),
}


def weighted(inner: Likelihood) -> WeightedRows:
    return WeightedRows(Weighted(), inner)


@pytest.mark.parametrize("name", HEADS)
def test_a_weight_multiplies_log_likelihood_and_score(name: str) -> None:
    inner, labels = HEADS[name]
    outputs = torch.randn(3, labels.shape[1] if labels.ndim > 1 else 3)
    weights = torch.tensor([3.0, 0.5, 0.0])
    joined = torch.cat([labels.reshape(3, -1).float(), weights[:, None]], 1)
    found = weighted(inner)
    assert torch.allclose(
        found.log_prob(outputs[None], joined[None])[0], weights * inner.log_prob(outputs[None], labels[None])[0]
    )
    parts = found.log_prob_parts(outputs[None], joined[None])
    assert torch.equal(parts.sum(-1), inner.log_prob(outputs[None], labels[None]))  # a weight is no part of a label
    assert torch.equal(found.weights(joined), weights)
    assert inner.weights(labels) is None
    terms = found.is_term(joined)
    assert torch.equal(terms, inner.is_term(labels))
    expected = weights[terms, None] * inner.score(outputs[terms], labels[terms])
    assert torch.allclose(found.score(outputs[terms], joined[terms]), expected)
    assert tuple(joined.shape) in found.label_shapes(tuple(outputs.shape))


@pytest.mark.parametrize(
    ("inner", "classes", "numbers"),
    [
        (Categorical(), True, False), (Bernoulli(), False, False), (Normal(0.5), False, True),
        (Adapted(Ordinal(num_classes=3), 2), False, False), (Adapted(Heteroscedastic(), 2), False, True),
    ],
)  # fmt: skip
def test_weights_do_not_change_the_kind_of_labels(inner: Likelihood, classes: bool, numbers: bool) -> None:
    for found in (inner, weighted(inner)):
        assert (found.predicts_classes, found.predicts_numbers) == (classes, numbers)
        assert found.has_check is isinstance(inner, Adapted)
    assert weighted(inner).noise_std is None  # a fit of the noise would count residuals without weights
    assert inner.noise_std == (0.5 if isinstance(inner, Normal) else None)


def test_negative_and_missing_weights_are_outside() -> None:
    found = weighted(Categorical())
    joined = torch.tensor([[1.0, 1.0], [1.0, -1.0], [1.0, math.nan], [7.0, 1.0]])
    assert found.outside(joined, 3).any(1).tolist() == [False, True, True, True]
    assert "column 'weight'" in found.support(3)


def test_another_likelihood_can_be_weighted() -> None:
    own = Weighted(Heteroscedastic(), column="w")
    found = own.build(2, Categorical)
    assert isinstance(found, WeightedRows)
    assert isinstance(found.inner, Adapted)
    assert own.columns == ("w",)
    assert found.label_shapes((4, 2)) == ((4, 2),)
    assert found.lacks == {"draw", "fisher"}


def test_anything_else_is_refused() -> None:
    with pytest.raises(ValueError, match="of must be a CustomLikelihood"):
        Weighted(of=Categorical())  # type: ignore[arg-type]
