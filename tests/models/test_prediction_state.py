"""A model predicts again as it did, whatever was changed in it: none of its attributes may be forgotten."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from hf_bayes import DirectPreferences, LaplaceConfig, Poisson, attach, fit_laplace
from hf_bayes.models.base import BayesianModel
from hf_bayes.models.calibrating import predicting_as_loaded
from hf_bayes.models.prediction_state import PredictionState
from tests.runs import label_rows
from tests.tiny_models import batch, tiny_bert, tiny_llama, with_lora

FIXED = {
    "layout", "_restoration", "members", "check_inputs", "lock", "texts_per_row", "head", "causal", "decoding",
    "preferences", "current_members",
}  # fmt: skip
"""Attributes that nothing replaces after ``__init__``. What is in ``current_members`` is replaced, and compared below.

A new attribute that a trainer or a fit changes belongs in ``prediction_fields``, and any other one here.
"""

MODELS: dict[str, Callable[[], BayesianModel]] = {
    "classifier": lambda: attach(tiny_bert(), subspace="last_layer", num_members=2),
    "counts": lambda: attach(tiny_bert(num_labels=1), subspace="last_layer", likelihood=Poisson()),
    "words": lambda: attach(with_lora(tiny_llama()), num_members=2),
    "preferences": lambda: attach(with_lora(tiny_llama()), num_members=2, likelihood=DirectPreferences()),
}


class unchanged_predictions:
    """Asserts that a model has, in the end, the attributes that it had, and the same members."""

    def __init__(self, model: BayesianModel) -> None:
        self.model, self.before, self.theta = model, self.attributes(model), model.theta.detach().clone()

    @staticmethod
    def attributes(model: BayesianModel) -> dict[str, Any]:
        fields = {name: getattr(model, name) for name in model.prediction_fields}  # the class has some of them
        own = {name: value for name, value in vars(model).items() if name not in vars(nn.Module())}
        shown = {f"current_members.{name}": value for name, value in vars(model.current_members).items()}
        return fields | own | shown | {"batch_statistics": model.members.context.batch_statistics}

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, *error: object) -> None:
        after = self.attributes(self.model)
        assert after.keys() == self.before.keys()
        assert [name for name, value in after.items() if value is not self.before[name]] == []
        assert torch.equal(self.model.theta, self.theta)


@pytest.mark.parametrize("name", MODELS)
def test_every_attribute_that_can_change_is_given_back(name: str) -> None:
    model = MODELS[name]()
    of_transformers = vars(model.core).keys()
    with unchanged_predictions(model):
        state = PredictionState(model)
        for attribute in (vars(model).keys() - of_transformers - FIXED) | {*model.prediction_fields}:
            setattr(model, attribute, object())
        for attribute in vars(model.current_members):
            setattr(model.current_members, attribute, object())
        model.place(model.theta.detach()[:1] + 1)
        model.members.context.batch_statistics = not model.members.context.batch_statistics
        state.restore()


def test_members_that_are_in_their_place_are_not_copied() -> None:
    model = MODELS["classifier"]()
    state, place = PredictionState(model), model.theta.data_ptr()
    state.restore()
    assert model.theta.data_ptr() == place
    model.place(model.theta.detach() + 1)
    state.restore()
    assert model.theta.data_ptr() != place  # a copy: the record can be used again
    assert torch.equal(model.theta, state.theta)


@pytest.mark.parametrize("raises", [False, True])
def test_a_block_that_predicts_as_loaded_leaves_no_trace(raises: bool) -> None:
    model = MODELS["classifier"]()
    posterior = fit_laplace(model, label_rows(20), LaplaceConfig())
    model.show(model.theta.detach() + 0.1, temperature=1.5)
    logits = model(**batch(rows=2)).logits
    raised = pytest.raises(KeyError) if raises else nullcontext()
    with unchanged_predictions(model), raised, predicting_as_loaded(model, posterior):
        assert model.predictor.prediction.startswith("linearised")
        assert not torch.equal(model(**batch(rows=2)).logits, logits)
        if raises:
            raise KeyError
    assert torch.equal(model(**batch(rows=2)).logits, logits)


def test_a_fit_of_the_noise_leaves_the_model_its_own() -> None:
    model = attach(tiny_bert(num_labels=1), subspace="last_layer", noise_std=3.0)
    rows = [{**row, "label": float(row["label"])} for row in label_rows(20)]
    with unchanged_predictions(model):
        posterior = fit_laplace(model, rows, LaplaceConfig(fit_noise=True))
    assert posterior.config.head["noise_std"] != 3.0
