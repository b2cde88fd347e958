from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hf_bayes.posteriors.card_results import Row, eval_results, evaluation_rows, read_beside, read_evaluation, stamp

EVALUATION = {
    "kind": "classes",
    "nll": 0.5,
    "ece": 0.03,
    "epistemic": 0.1,
    "auroc": {"news": {"epistemic": 0.8, "total": 0.7, "confidence": None}},
    "std_error": {"nll": 0.01, "auroc": {"news": {"epistemic": 0.02}}},
}


def results(metrics: dict[str, Any], **changes: Any) -> dict[tuple[str, str], float]:
    config = {"metrics": metrics, "calibration": {}} | changes.pop("config", {})
    found = eval_results(config, "text-classification", **changes)
    return {(result.dataset_name, result.metric_type): result.metric_value for result in found}


def test_scores_and_calibration_of_the_run_are_reported() -> None:
    found = results({"eval_nll": 0.4, "ece": 0.02, "epistemic": 0.1, "map_nll": 0.5, "limit_nll": 0.3, "brier": None})
    assert found == {("held-out data", "nll"): 0.4, ("held-out data", "ece"): 0.02}
    found = results({}, config={"calibration": {"calibrated_nll": 0.39}})
    assert found == {("held-out data", "calibrated_nll"): 0.39}


def test_figures_of_a_named_set_belong_to_that_set() -> None:
    assert results({"far_nll": 2.0, "far_ece": 0.3}) == {("far (held-out)", "nll"): 2.0, ("far (held-out)", "ece"): 0.3}


def test_the_only_data_set_of_the_author_is_named() -> None:
    (found,) = eval_results({"metrics": {"nll": 0.4}}, "text-generation", ["user/set"])
    assert (found.dataset_type, found.dataset_name) == ("user/set", "user/set (held-out rows)")


def test_an_evaluation_adds_the_detection_of_other_data() -> None:
    assert evaluation_rows(EVALUATION) == [
        Row("test", "nll", 0.5, 0.01), Row("test", "ece", 0.03, None), Row("news", "auroc_epistemic", 0.8, 0.02),
        Row("news", "auroc_total", 0.7, None),
    ]  # fmt: skip
    found = results({}, evaluation=EVALUATION)
    assert found["news against the test set", "auroc_epistemic"] == 0.8
    assert found["test set of hf-bayes evaluate", "ece"] == 0.03


def test_other_content_of_the_file_is_left_out() -> None:
    for odd in ({"nll": "low", "auroc": [1]}, {"auroc": {"x": 3}, "std_error": 2}, {}):
        assert evaluation_rows(odd) == []


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"posterior": "abc", "loss": 1}, "results.json has no figures: give results.json of hf-bayes evaluate"),
        ({"nll": 0.5}, "results.json does not record which posterior it is of: run hf-bayes evaluate again"),
        ({"nll": 0.5, "posterior": None}, "does not record which posterior it is of"),
        ({"nll": 0.5, "posterior": "abd"}, "of another posterior .fingerprint 'abd', expected 'abc'.: run hf-bayes"),
    ],
)
def test_only_figures_of_the_same_posterior_are_read(tmp_path: Path, content: dict[str, Any], words: str) -> None:
    file = tmp_path / "results.json"
    file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=words):
        read_evaluation(file, "abc")
    file.write_text(json.dumps(EVALUATION | {"posterior": "abc"}))
    assert read_evaluation(file, "abc")["nll"] == 0.5


def test_a_file_beside_the_card_names_its_posterior(tmp_path: Path) -> None:
    file = tmp_path / "heat_map.png"
    file.write_bytes(b"\x89PNG " + stamp("abc").encode())
    assert read_beside(file, "abc").startswith(b"\x89PNG")
    with pytest.raises(ValueError, match=r"heat_map\.png is of another posterior, or .* not hold 'posterior abd'"):
        read_beside(file, "abd")
    evaluation = tmp_path / "evaluation.json"
    evaluation.write_text(json.dumps(EVALUATION | {"posterior": "abc", "notes": stamp("abd")}))
    with pytest.raises(ValueError, match="figures of another posterior"):
        read_beside(evaluation, "abd")


def test_figures_of_other_models_on_a_named_set_are_left_out() -> None:
    assert not results({"near_map_nll": 0.5, "far_member_nll": 0.4, "far_limit_nll": 0.3})
