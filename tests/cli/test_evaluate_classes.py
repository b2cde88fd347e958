from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import log_loss

from hf_bayes.cli.evaluate_classes import ClassArguments, class_names, class_sets, evaluate_classes
from hf_bayes.cli.padding import Padding
from hf_bayes.models.attaching import attach
from hf_bayes.models.classification import BayesianClassifier
from tests.tiny_models import TEXTS, tiny_bert, tiny_tokenizer

NAMES = ["even", "odd", "other"]


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    rows = [{"text": f"{TEXTS[i % 4][: 9 + i]} {i}", "label": NAMES[i % 2]} for i in range(7)]
    (tmp_path / "test.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "other.jsonl").write_text("\n".join(json.dumps({"text": row["text"]}) for row in rows[:5]))
    return {name: str(tmp_path / f"{name}.jsonl") for name in ("test", "other")}


def classifier() -> BayesianClassifier:
    """Return a tiny classifier of three members."""
    model = attach(tiny_bert(num_labels=3), subspace="last_block", num_members=3)
    model.theta.data += 0.3 * torch.randn(model.theta.shape, generator=torch.Generator().manual_seed(0))
    assert isinstance(model, BayesianClassifier)
    return model


def evaluated(files: dict[str, str], *, batch_size: int = 3, padding: Padding = "data") -> Any:
    sets = class_sets(files, tiny_tokenizer(), NAMES, ClassArguments())
    return evaluate_classes(classifier(), sets, tiny_tokenizer(), batch_size=batch_size, padding=padding)


@pytest.mark.parametrize(
    "head",
    [
        {"labels": ["LABEL_0"]},
        {"labels": ["a", "b"], "problem_type": "regression"},
        {"labels": ["a", "b"], "problem_type": "multi_label_classification"},
    ],
)
def test_a_posterior_without_one_class_a_row_is_refused(head: dict[str, Any]) -> None:
    problem = head.get("problem_type", "regression")
    with pytest.raises(ValueError, match=f"out is a posterior for {problem}, expected one class for each row"):
        class_names(head, "out")


def test_only_test_rows_need_labels(files: dict[str, str]) -> None:
    sets = class_sets(files, tiny_tokenizer(), NAMES, ClassArguments())
    assert sets["test"]["labels"] == [0, 1, 0, 1, 0, 1, 0]
    assert "labels" not in sets["other"].column_names
    with pytest.raises(ValueError, match=r"other.jsonl has no column 'label', only text: name one of them"):
        class_sets({"test": files["other"]}, tiny_tokenizer(), NAMES, ClassArguments())


def test_statistics_are_those_of_each_text_alone(files: dict[str, str]) -> None:
    found, model = evaluated(files), classifier()
    sets = class_sets(files, tiny_tokenizer(), NAMES, ClassArguments())
    for name, rows in sets.items():
        for place, row in enumerate(rows):
            inputs = {key: torch.tensor([row[key]]) for key in ("input_ids", "attention_mask")}
            with torch.no_grad():
                output = model(**inputs)
            for measure in ("total", "aleatoric", "epistemic"):  # float32; padding changes the last digits
                assert found[name][measure][place, 0] == pytest.approx(float(getattr(output, measure)), abs=1e-5)
            assert found[name]["confidence"][place, 0] == pytest.approx(float(output.logits.exp().max()), abs=1e-5)
    assert found["test"]["nll"].shape == (7, 1)
    assert "nll" not in found["other"]


def test_nll_of_the_mixture_is_the_log_loss(files: dict[str, str]) -> None:
    found, model = evaluated(files)["test"], classifier()
    rows = class_sets(files, tiny_tokenizer(), NAMES, ClassArguments())["test"]
    with torch.no_grad():
        logits = torch.cat([model.member_logits({"input_ids": torch.tensor([ids])}) for ids in rows["input_ids"]], 1)
    mixture = logits.double().softmax(-1).mean(0).numpy()
    assert found["nll"].mean() == pytest.approx(log_loss(rows["labels"], mixture, labels=range(3)), abs=1e-5)


def test_padding_and_batch_size_change_no_figure(files: dict[str, str]) -> None:
    expected = evaluated(files)
    for found in (evaluated(files, padding="batch"), evaluated(files, batch_size=7)):
        for name, statistics in expected.items():
            for key, values in statistics.items():
                np.testing.assert_allclose(found[name][key], values, atol=1e-5)
