from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from hf_bayes.cli.evaluation.labels import LABEL_CASE, scored_labels
from hf_bayes.models.base import BayesianModel
from hf_bayes.models.predictives.custom import of_gaussian
from hf_bayes.uncertainty.several_labels import Bernoulli, decompose_labels
from tests.cli.evaluated import NUM_ROWS, SENTENCES, found_by, inputs_of, members_of, write_rows
from tests.tiny_models import tiny_bert

NAMES = ["red", "green", "blue"]
LABELS = [NAMES[: i % 4] for i in range(NUM_ROWS)]


@pytest.fixture
def model() -> BayesianModel:
    return members_of(tiny_bert(num_labels=3, problem_type="multi_label_classification"))


def member_probabilities(model: BayesianModel) -> tuple[Tensor, Tensor]:
    """Return [M, R, C] logits of all texts, one by one, and [R, C] labels."""
    with torch.no_grad():
        logits = torch.cat([model.member_logits(inputs_of(text)) for text in SENTENCES], 1).double()
    return logits, torch.tensor([[float(name in row) for name in NAMES] for row in LABELS], dtype=torch.float64)


def test_scores_follow_from_the_members_probabilities(tmp_path: Path, model: BayesianModel) -> None:
    found = found_by(LABEL_CASE, model, write_rows(tmp_path, LABELS), NAMES)["test"]
    logits, labels = member_probabilities(model)
    probability = logits.sigmoid().mean(0)
    own = torch.where(labels == 1, probability, 1 - probability)
    expected = {
        "probability": probability,
        "label": labels,
        "nll": -own.log().sum(-1, keepdim=True),
        "label_nll": -own.log(),
        "brier": (probability - labels).square(),
        "correct": ((probability > 0.5) == (labels == 1)).all(-1, keepdim=True),
        "confidence": torch.maximum(probability, 1 - probability).prod(-1, keepdim=True),
    }
    for name, values in expected.items():
        torch.testing.assert_close(torch.tensor(found[name]), values.double(), rtol=0, atol=1e-5, msg=name)


def test_uncertainties_are_sums_over_the_labels(tmp_path: Path, model: BayesianModel) -> None:
    found = found_by(LABEL_CASE, model, write_rows(tmp_path, LABELS), NAMES)
    logits, _ = member_probabilities(model)
    for name, values in decompose_labels(logits)._asdict().items():
        for part in ("test", "other"):
            rows = torch.tensor(found[part][name])
            torch.testing.assert_close(rows, values[: len(rows), None], rtol=0, atol=1e-5)
    assert "label" not in found["other"]


def test_a_label_that_the_model_does_not_have_is_refused(tmp_path: Path, model: BayesianModel) -> None:
    files = write_rows(tmp_path, [*LABELS[:-1], ["purple"]])
    message = r"line 7 of .*test.jsonl has the label \['purple'\], expected a list out of the 3 labels of the model"
    with pytest.raises(ValueError, match=message):
        found_by(LABEL_CASE, model, files, NAMES)


def test_gaussian_labels_are_scored_without_members() -> None:
    found = scored_labels(
        of_gaussian(torch.zeros(1, 4, 3), torch.ones(1, 4, 3), Bernoulli(), "probit"), torch.ones(4, 3)
    )
    assert {"member_nll", "epistemic"}.isdisjoint(found)  # probit defines the total alone
    torch.testing.assert_close(found["probability"], torch.full((4, 3), 0.5))
    torch.testing.assert_close(found["total"], found["nll"])  # every label has the probability one half
