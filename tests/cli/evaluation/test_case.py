from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset

from hf_bayes.cli.evaluation.case import Case, Found, evaluate
from hf_bayes.cli.evaluation.classes import CLASS_CASE
from hf_bayes.models.base import BayesianModel
from tests import runs
from tests.cli.evaluated import members_of
from tests.members.subject_models import bert_tagger

LENGTHS = [5, 2, 4]


@pytest.fixture
def tagger() -> BayesianModel:
    return members_of(bert_tagger(torch.float32))


def rows_of() -> Dataset:
    """Return rows of unequal length whose first token has no label."""
    rows = runs.token_rows(LENGTHS)
    return Dataset.from_list([{**row, "labels": [-100] + [t % 3 for t in row["labels"][1:]]} for row in rows])


def found_by(model: BayesianModel, case: Case = CLASS_CASE, **sets: Dataset) -> Found:
    return evaluate(model, sets, case, runs.padding_collator(), batch_size=2)


def test_terms_stay_in_their_row(tagger: BayesianModel) -> None:
    found = found_by(tagger, test=rows_of())["test"]
    for place, (row, length) in enumerate(zip(rows_of(), LENGTHS, strict=True)):
        with torch.no_grad():
            alone, _ = tagger.evaluate_batch({name: torch.tensor([values]) for name, values in row.items()})
        for name in ("nll", "total", "correct"):
            assert found[name][place, : length - 1] == pytest.approx(alone[name].double().numpy(), abs=1e-5)
            assert np.isnan(found[name][place, length - 1 :]).all()
    assert found["nll"].shape == (3, 4)


def test_only_the_test_set_is_scored(tagger: BayesianModel) -> None:
    found = found_by(tagger, test=rows_of(), other=rows_of())
    assert set(found["other"]) == {"confidence", "total", "aleatoric", "epistemic"}
    for name, values in found["other"].items():
        np.testing.assert_array_equal(values, found["test"][name])


@pytest.mark.parametrize(("name", "value", "refused"), [("total", torch.inf, True), ("nll", torch.inf, False),
                                                        ("nll", torch.nan, True)])  # fmt: skip
def test_numbers_that_are_not_finite_are_refused(tagger: BayesianModel, name: str, value: float, refused: bool) -> None:
    def scored(found: Any, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: torch.full((int((labels != -100).sum()),), value)}

    case = dataclasses.replace(CLASS_CASE, scored=scored)
    if not refused:  # a label may have probability 0
        assert np.nanmax(found_by(tagger, case, test=rows_of())["test"][name]) == value
        return
    with pytest.raises(ValueError, match=rf"8 of 8 values of '{name}' on the set 'test' are not finite: the members"):
        found_by(tagger, case, test=rows_of())
