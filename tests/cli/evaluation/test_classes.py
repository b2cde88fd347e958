from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import log_loss

from hf_bayes.cli.evaluation.classes import CLASS_CASE
from hf_bayes.models.base import BayesianModel
from tests.cli.evaluated import NUM_ROWS, SENTENCES, found_by, inputs_of, members_of, write_rows
from tests.tiny_models import tiny_bert

NAMES = ["even", "odd", "other"]
LABELS = [NAMES[i % 2] for i in range(NUM_ROWS)]


@pytest.fixture
def model() -> BayesianModel:
    return members_of(tiny_bert(num_labels=3))


def test_statistics_are_those_of_each_text_alone(tmp_path: Path, model: BayesianModel) -> None:
    found = found_by(CLASS_CASE, model, write_rows(tmp_path, LABELS), NAMES)
    for name, count in (("test", 7), ("other", 5)):
        for place, text in enumerate(SENTENCES[:count]):
            with torch.no_grad():
                output = model(**inputs_of(text))
            for measure in ("total", "aleatoric", "epistemic"):  # float32; padding changes the last digits
                assert found[name][measure][place, 0] == pytest.approx(float(getattr(output, measure)), abs=1e-5)
            assert found[name]["confidence"][place, 0] == pytest.approx(float(output.logits.exp().max()), abs=1e-5)
    assert found["test"]["nll"].shape == (7, 1)
    assert "nll" not in found["other"]


def test_nll_of_the_mixture_is_the_log_loss(tmp_path: Path, model: BayesianModel) -> None:
    found = found_by(CLASS_CASE, model, write_rows(tmp_path, LABELS), NAMES)["test"]
    with torch.no_grad():
        logits = torch.cat([model.member_logits(inputs_of(text)) for text in SENTENCES], 1)
    mixture = logits.double().softmax(-1).mean(0).numpy()
    labels = [NAMES.index(label) for label in LABELS]
    assert found["nll"].mean() == pytest.approx(log_loss(labels, mixture, labels=range(3)), abs=1e-5)


def test_padding_and_batch_size_change_no_figure(tmp_path: Path, model: BayesianModel) -> None:
    files = write_rows(tmp_path, LABELS)
    expected = found_by(CLASS_CASE, model, files, NAMES)
    for options in ({"padding": "batch"}, {"batch_size": 7}):
        found = found_by(CLASS_CASE, model, files, NAMES, **options)
        for name, statistics in expected.items():
            for key, values in statistics.items():
                np.testing.assert_allclose(found[name][key], values, atol=1e-5)
