from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import EvalPrediction

import hf_bayes
from hf_bayes.core.layout import select
from hf_bayes.models.attaching import attach
from hf_bayes.models.classification import BayesianModelForSequenceClassification
from hf_bayes.posteriors.posterior import Posterior
from tests import runs
from tests.members.reference import entropies, mixture, scattered, separate_logits
from tests.members.subject_models import bert_tagger, llama_tagger
from tests.members.subjects import labelled
from tests.models.trained import from_disk, run
from tests.tiny_models import batch, with_lora
from tests.training.test_evaluation import brute_force
from tests.training.trained import METRICS

LENGTHS = [8, 3, 6, 5]


def tagged_rows(seed: int = 0) -> list[dict[str, Any]]:
    """Every third token has no label, some first ones among them."""
    rows = runs.token_rows(LENGTHS, seed=seed)
    return [{**row, "labels": [-100 if t % 3 == 0 else t % 3 for t in row["input_ids"]]} for row in rows]


def test_a_taggers_terms_are_its_labels_unshifted(tmp_path: Path) -> None:
    rows = tagged_rows()
    labels = [label for row in rows for label in row["labels"]]
    unshifted = sum(label != -100 for label in labels)
    shifted = sum(label != -100 for row in rows for label in row["labels"][1:])
    trainer = run(tmp_path, bert_tagger(torch.float32), rows, rows, subspace="last_layer",
                  collator=runs.padding_collator(), minibatch="shared", per_device_train_batch_size=4)  # fmt: skip
    assert trainer.rows.num_data == unshifted != shifted
    objective = runs.started(trainer).objective
    assert objective.terms_of([next(iter(trainer.get_train_dataloader()))]).tolist() == [unshifted] * 2


def test_shifting_a_taggers_labels_is_caught() -> None:
    model = llama_tagger(torch.float64)
    theta = scattered(model, select(model, "last_layer"))
    inputs = labelled("llama-tagger-head")
    shifted = {**inputs, "labels": nn.functional.pad(inputs["labels"][:, 1:], (0, 1), value=-100)}
    with torch.no_grad(), attach(model, theta, subspace="last_layer") as bayesian:
        right, wrong = (bayesian(**rows, theta=theta).loss for rows in (inputs, shifted))
    assert ((right - wrong).abs() > 0.1).all()


def test_a_tagger_is_trained_evaluated_saved_and_loaded(tmp_path: Path) -> None:
    held_out, seen = tagged_rows(seed=5), []

    def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
        seen.append(prediction)
        return {}

    base = from_disk(bert_tagger(torch.float32), tmp_path / "base")
    trainer = run(tmp_path, with_lora(base), tagged_rows(), held_out, collator=runs.padding_collator(),
                  compute_metrics=compute_metrics)  # fmt: skip
    trainer.train()
    found = trainer.evaluate()
    trainer.save_model()
    theta, layout = trainer.posterior.sample(None), trainer.bayesian.layout
    plain = with_lora(bert_tagger(torch.float32))
    plain.load_state_dict(trainer.bayesian.detach().state_dict())
    logits, labels = [], []
    for row in held_out:
        terms = torch.tensor(row["labels"]) != -100
        logits.append(
            separate_logits(plain, layout, theta, {"input_ids": torch.tensor([row["input_ids"]])})[:, 0, terms]
        )
        labels.append(torch.tensor(row["labels"])[terms])
    expected = brute_force(torch.cat(logits, 1).double().log_softmax(-1), torch.cat(labels))
    # float32 logits; epistemic is a difference
    assert {name: found[f"eval_{name}"] for name in METRICS} == pytest.approx(expected, rel=2e-5, abs=2e-6)
    assert seen[0].predictions.shape == (4, 8, 3)
    assert (seen[0].label_ids == -100).sum() == sum(-100 in [label] for row in held_out for label in row["labels"]) + 10

    assert Posterior.from_pretrained(tmp_path / "posterior").config.task == "token_classification"
    loaded = hf_bayes.BayesianModelForTokenClassification.from_pretrained(tmp_path / "posterior")
    with torch.no_grad():
        output = loaded(**batch())
    reference = separate_logits(plain, layout, theta, batch())
    torch.testing.assert_close(output.logits.double(), mixture(reference), rtol=0, atol=1e-5)
    torch.testing.assert_close(output.epistemic.double(), entropies(reference)[2], rtol=0, atol=1e-5)
    assert loaded.config.id2label == base.config.id2label
    with pytest.raises(ValueError, match="is a posterior for token_classification, not sequence_classification"):
        BayesianModelForSequenceClassification.from_pretrained(tmp_path / "posterior")
