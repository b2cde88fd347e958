"""A stored threshold, and its use by pipelines."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

from hf_bayes import BayesianModelForSequenceClassification, Posterior, distil, pipeline
from hf_bayes.decide.abstention import class_uncertainty, fit_abstention, rule_for, with_abstention
from hf_bayes.fit import distil_training
from hf_bayes.methods.averaging.ensemble import EnsembleConfig
from hf_bayes.posteriors.abstention import CLASS_MEASURES, Abstention
from tests import runs
from tests.fit import distilled
from tests.posteriors.test_abstention import RULE
from tests.tiny_models import TEXTS, tiny_bert, tiny_tokenizer

ROWS = [{"labels" if name == "label" else name: v for name, v in row.items()} for row in runs.label_rows(60, seed=5)]
EASY: dict[str, Any] = {"error_rate": 0.95, "failure_rate": 0.2}
"""A promise that guesses keep."""


@pytest.fixture(scope="module")
def posterior(tmp_path_factory: pytest.TempPathFactory) -> Posterior:
    trainer = runs.trainer(
        tmp_path_factory.mktemp("run"), EnsembleConfig(num_chains=3, prior_std=3.0), model=tiny_bert(),
        subspace="last_layer", train=runs.label_rows(10), max_steps=20, learning_rate=0.3,
    )  # fmt: skip
    trainer.train()
    return trainer.posterior


def pipe(posterior: Any, **loading: Any) -> Any:
    model = BayesianModelForSequenceClassification.from_pretrained(posterior, base_model=tiny_bert(), **loading)
    return pipeline("bayesian-text-classification", model, tiny_tokenizer())


def test_a_threshold_is_stored_and_used_by_a_pipeline(posterior: Posterior, tmp_path: Path) -> None:
    fit_abstention(posterior, ROWS, base_model=tiny_bert(), **EASY).save_pretrained(tmp_path)
    stored = Posterior.from_pretrained(tmp_path).config.abstention
    assert stored["num_members"] == 3
    classify = pipe(tmp_path)
    found = classify(list(TEXTS), abstain=True)
    assert [record["abstained"] for record in found] == [
        record["uncertainty"]["total"] > stored["threshold"] for record in found
    ]
    assert "abstained" not in classify(TEXTS[0])[0]
    assert "abstained" not in classify(TEXTS[0], abstain=False)[0]


@pytest.mark.parametrize("measure", CLASS_MEASURES)
def test_each_measure_withholds_what_is_above_its_threshold(posterior: Posterior, measure: str) -> None:
    classify = pipe(posterior)
    records = classify(list(TEXTS))
    values = [
        1 - record["score"] if measure == "one_minus_confidence" else record["uncertainty"][measure]
        for record in records
    ]
    rule = dataclasses.replace(RULE, measure=measure, threshold=sorted(values)[1] + 1e-6)
    found = classify(list(TEXTS), abstain=rule)
    assert [record["abstained"] for record in found] == [value > rule.threshold for value in values]
    assert sum(record["abstained"] for record in found) == len(TEXTS) - 2


def test_the_heldout_rows_are_judged_by_the_mixture(posterior: Posterior) -> None:
    stored = fit_abstention(posterior, ROWS, base_model=tiny_bert(), **EASY).config.abstention
    with torch.no_grad(), pipe(posterior).model as model:
        inputs = [{name: torch.tensor([value]) for name, value in row.items() if name != "labels"} for row in ROWS]
        logits = torch.cat([model(**each).logits for each in inputs])
    wrong = logits.argmax(-1) != torch.tensor([row["labels"] for row in ROWS])
    answered = (-(logits.exp() * logits).sum(-1) <= stored["threshold"] + 1e-6) & (torch.arange(60) % 4 > 0)
    assert stored["heldout_error_rate"] == pytest.approx(wrong[answered].double().mean().item())
    assert stored["answered"] == pytest.approx(answered.sum().item() / 45)


@pytest.mark.parametrize("measure", CLASS_MEASURES)
def test_a_pipeline_answers_at_the_threshold_itself(posterior: Posterior, measure: str) -> None:
    classify = pipe(posterior)
    for text in TEXTS:
        row = {**classify.tokenizer(text), "labels": classify.model.config.label2id[classify(text)[0]["label"]]}
        found = fit_abstention(posterior, [row] * 20, base_model=tiny_bert(), measure=measure, batch_size=1, **EASY)
        rule = Abstention.from_dict(found.config.abstention)
        assert rule.answered == 1
        assert classify(text, abstain=rule)[0]["abstained"] is False


def test_an_uncertainty_does_not_depend_on_the_other_rows() -> None:
    log_probs = torch.randn(37, 5, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    together = class_uncertainty(log_probs, {}, "one_minus_confidence")
    apart = [class_uncertainty(row[None], {}, "one_minus_confidence") for row in log_probs]
    assert torch.equal(together, torch.cat(apart))
    with pytest.raises(ValueError, match="does not define aleatoric: choose another measure"):
        class_uncertainty(log_probs, {}, "aleatoric")


def test_a_students_uncertainty_may_have_a_threshold(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(distil_training, "UPDATES", 30)
    with_student = partial(distil, rows=distilled.ROWS, base_model=tiny_bert(), batch_size=50, progress=False)
    student = with_student(distilled.ensemble("classes"))
    found = fit_abstention(student, ROWS, base_model=tiny_bert(), prediction="distilled", **EASY)
    found.save_pretrained(tmp_path)
    stored = Posterior.from_pretrained(tmp_path).config.abstention
    assert (stored["prediction"], stored["num_members"]) == ("distilled", 0)
    records = pipe(tmp_path, prediction="distilled")(list(TEXTS), abstain=True)
    assert [record["abstained"] for record in records] == [
        record["uncertainty"]["total"] > stored["threshold"] for record in records
    ]
    with pytest.raises(ValueError, match="fitted with prediction='distilled', and the model has 'members'"):
        pipe(tmp_path)(TEXTS[0], abstain=True)
    assert with_student(found).config.abstention == {}


def test_a_threshold_of_another_prediction_is_refused(posterior: Posterior) -> None:
    stored = with_abstention(posterior, RULE)
    with pytest.raises(ValueError, match=r"fitted with num_members=3, and the model has 2"):
        pipe(stored, members=2)(TEXTS[0], abstain=True)
    with pytest.raises(ValueError, match=r"fitted with temperature=0\.5, and the model has 1\.0"):
        pipe(with_abstention(posterior, dataclasses.replace(RULE, temperature=0.5)))(TEXTS[0], abstain=True)
    with pytest.raises(ValueError, match="none is stored: fit one with"):
        pipe(posterior)(TEXTS[0], abstain=True)
    with pytest.raises(ValueError, match="threshold is of nll_per_token, which this pipeline does not compute"):
        rule_for(pipe(posterior).model, dataclasses.replace(RULE, measure="nll_per_token"), CLASS_MEASURES)
    with pytest.raises(ValueError, match=r"abstain must be True, False or an Abstention, got 0\.3"):
        pipe(posterior)(TEXTS[0], abstain=0.3)


def test_too_few_rows_and_unknown_measures_are_refused(posterior: Posterior) -> None:
    with pytest.raises(ValueError, match=r"10 held-out rows are too few .* give at least"):
        fit_abstention(posterior, Dataset.from_list(ROWS[:10]), error_rate=0.1, base_model=tiny_bert(), batch_size=1)
    with pytest.raises(ValueError, match=r"unknown measure 'doubt': expected one of"):
        fit_abstention(posterior, ROWS, error_rate=0.1, measure="doubt")


@pytest.mark.parametrize(("rows", "words"), [([], "heldout has 0 rows; fit_abstention needs"), (None, "got NoneType")])
def test_absent_rows_are_refused(posterior: Posterior, rows: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        fit_abstention(posterior, rows, error_rate=0.1, base_model=tiny_bert())
