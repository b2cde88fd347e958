"""Likelihoods by name, as a saved posterior stores them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import ClassVar

import pytest
from torch import Tensor

from hf_bayes.uncertainty.custom import registry
from hf_bayes.uncertainty.custom.base import CustomLikelihood, Moments
from hf_bayes.uncertainty.custom.poisson import Poisson
from hf_bayes.uncertainty.custom.registry import likelihood_from, register_likelihood
from hf_bayes.uncertainty.custom.weighted import Weighted
from tests.uncertainty.custom.cases import OWN
from tests.uncertainty.custom.test_base import DoubleExponential


@pytest.mark.parametrize("own", [*OWN.values(), Weighted(), Weighted(Poisson(), column="w")])
def test_a_likelihood_survives_json(own: CustomLikelihood) -> None:
    assert likelihood_from(json.loads(json.dumps(own.to_dict()))) == own


def test_an_unknown_name_is_refused_with_the_way_out() -> None:
    stored = DoubleExponential(2.0).to_dict()
    with pytest.raises(ValueError, match=r"'double_exponential' is not registered.*import the module"):
        likelihood_from(stored)
    assert likelihood_from(stored, given=DoubleExponential(2.0)) == DoubleExponential(2.0)
    with pytest.raises(ValueError, match="the members were trained with the first"):
        likelihood_from(stored, given=DoubleExponential(1.0))


@pytest.mark.parametrize("stored", [{"name": "poisson"}, {"name": "poisson", "num_counts": 1, "more": 0}])
def test_unknown_and_missing_fields_are_refused(stored: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="has the fields"):
        likelihood_from(stored)


@pytest.mark.parametrize("stored", [None, [], {"name": 3}, {"name": "poisson", "num_counts": -1}])
def test_damaged_entries_are_refused(stored: object) -> None:
    with pytest.raises(ValueError, match="likelihood"):
        likelihood_from(stored)


def test_registering_makes_a_class_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "LIKELIHOODS", dict(registry.LIKELIHOODS))
    assert register_likelihood(DoubleExponential) is DoubleExponential
    assert register_likelihood(DoubleExponential) is DoubleExponential  # a module that is run again
    assert likelihood_from(DoubleExponential(3.0).to_dict()) == DoubleExponential(3.0)


def test_classes_that_cannot_be_stored_are_refused() -> None:
    class Thawed(DoubleExponential):
        name: ClassVar[str] = "thawed"

    @dataclass(frozen=True)
    class Taken(CustomLikelihood):
        name: ClassVar[str] = "poisson"

        def log_prob(self, outputs: Tensor, labels: Tensor) -> Tensor:
            return outputs[..., 0]

        def predict(self, outputs: Tensor) -> Moments:
            return Moments(outputs, outputs)

    with pytest.raises(ValueError, match="must be a frozen dataclass"):
        register_likelihood(Thawed)
    with pytest.raises(ValueError, match="the name 'poisson' belongs to"):
        register_likelihood(Taken)
    with pytest.raises(ValueError, match="takes a subclass of CustomLikelihood"):
        register_likelihood(int)  # type: ignore[type-var]
