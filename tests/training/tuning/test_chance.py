"""The comparison of a choice with guessing."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
from datasets import Dataset

from hf_bayes.models.attaching import attach
from hf_bayes.models.base import BayesianModel
from hf_bayes.training.tuning.chance import guess, warning
from tests.tiny_models import tiny_bert, tiny_llama
from tests.training.tuning.test_record import trial


@pytest.fixture(scope="module")
def model() -> Iterator[BayesianModel]:
    with attach(tiny_bert(num_labels=3), subspace="last_layer") as bayesian:
        yield bayesian


def labelled(labels: list[object], column: str = "labels") -> Dataset:
    return Dataset.from_dict({column: labels})


@pytest.mark.parametrize("column", ["labels", "label"])
@pytest.mark.parametrize("kind", [None, "torch", "numpy"])
def test_guessing_knows_only_the_frequencies(model: BayesianModel, column: str, kind: str | None) -> None:
    rows = labelled([0, 0, 0, 1], column).with_format(kind)
    found = guess(model, rows, labelled([0, 2], column))
    assert found is not None
    assert found.nll == pytest.approx([math.log(8 / 4), math.log(8)])  # five other rows and three classes


@pytest.mark.parametrize(
    "rows",
    [
        labelled([[0, 1], [1, 0]]),
        labelled([0.5, 1.0]),
        labelled([0, -100]),
        labelled(["a", "b"]),
        labelled([0, 1], "target"),
        labelled([0, 1]).with_transform(lambda rows: {"labels": rows["text"]}),
        [{"labels": 0}],
    ],
)
def test_labels_that_are_no_classes_are_not_guessed(model: BayesianModel, rows: object) -> None:
    assert guess(model, labelled([0, 1]), rows) is None
    assert guess(model, rows, labelled([0, 1])) is None


def test_tokens_are_not_guessed() -> None:
    with attach(tiny_llama(), subspace="last_block") as bayesian:
        tokens = labelled([[1, 2], [3, 4]])
        assert guess(bayesian, tokens, tokens) is None


def test_only_a_choice_no_better_than_guessing_is_warned_of() -> None:
    guessed = trial(nll=[0.7] * 4)
    assert "no better than guessing" in warning(trial(nll=[0.5, 0.9, 0.4, 0.9]), guessed)
    assert "(0.7000)" in warning(trial(nll=[0.7, 0.71, 0.7, 0.7]), guessed)
    assert warning(trial(nll=[0.5, 0.6, 0.4, 0.5]), guessed) == ""
    assert warning(trial(nll=[0.9] * 4), None) == ""
