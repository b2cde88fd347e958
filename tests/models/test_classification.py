"""Heads other than a language model's: from a trainer to a directory and back, against separate models."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import EvalPrediction, PreTrainedModel

import hf_bayes
from hf_bayes.core.layout import select
from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from hf_bayes.models.attaching import attach
from hf_bayes.models.classification import BayesianModelForSequenceClassification
from hf_bayes.models.image_classification import BayesianModelForImageClassification
from hf_bayes.models.token_classification import BayesianModelForTokenClassification
from hf_bayes.posteriors.posterior import Posterior
from tests import runs
from tests.members.reference import entropies, mixture, scattered, separate_logits
from tests.members.subjects import bert_tagger, labelled, llama_tagger
from tests.tiny_models import batch, images, tiny_bert, tiny_llama, tiny_vit, with_lora
from tests.training.test_evaluation import METRICS, brute_force

LENGTHS = [8, 3, 6, 5]


def tagged_rows(seed: int = 0) -> list[dict[str, Any]]:
    """Every third token has no label, some first ones among them."""
    rows = runs.token_rows(LENGTHS, seed=seed)
    return [{**row, "labels": [-100 if t % 3 == 0 else t % 3 for t in row["input_ids"]]} for row in rows]


def image_rows(count: int = 4, seed: int = 0) -> list[dict[str, Any]]:
    pixels = images(count, seed)["pixel_values"].tolist()
    return [{"pixel_values": image, "label": row % 3} for row, image in enumerate(pixels)]


def numbered_rows(outputs: int, seed: int = 0) -> list[dict[str, Any]]:
    rows = runs.label_rows(6, seed=seed)
    values = torch.randn((6, outputs), generator=torch.Generator().manual_seed(seed)).tolist()
    return [{**row, "label": value if outputs > 1 else value[0]} for row, value in zip(rows, values, strict=True)]


def run(tmp_path: Path, model: nn.Module, rows: list[dict], held_out: list[dict], **changes: Any) -> Any:
    return runs.trainer(
        tmp_path / "posterior",
        SGHMCConfig(num_chains=2, draws_per_chain=2),
        model=model,
        train=rows,
        eval_dataset=held_out,
        max_steps=4,
        **changes,
    )


def from_disk(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """The model with a folder of its own, so that a posterior on it finds its base again."""
    model.save_pretrained(folder)
    return type(model).from_pretrained(folder)


# -- which class -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (tiny_bert, BayesianModelForSequenceClassification),
        (lambda: bert_tagger(torch.float32), BayesianModelForTokenClassification),
        (lambda: llama_tagger(torch.float32), BayesianModelForTokenClassification),
        (tiny_vit, BayesianModelForImageClassification),
        (tiny_llama, hf_bayes.BayesianModelForCausalLM),
    ],
    ids=["classifier", "tagger", "causal tagger", "images", "language model"],
)
def test_the_head_of_a_model_decides_its_class(make: Callable[[], nn.Module], kind: type) -> None:
    with attach(make(), subspace="last_layer") as bayesian:
        assert type(bayesian) is kind
        assert bayesian.auto_class.__name__.removeprefix("AutoModel") in kind.__name__


def test_passes_over_images_are_sized_by_patches() -> None:
    with attach(tiny_vit(), subspace="last_layer", num_members=2) as bayesian:
        assert bayesian.num_positions(images()) == bayesian.core.vit(**images()).last_hidden_state.shape[1] == 5


@pytest.mark.parametrize(
    ("make", "problem", "labels", "message"),
    [
        (lambda: tiny_bert(), None, torch.zeros(3, 2, dtype=torch.long), r"labels \[3, 2\] .* expects \[3\]"),
        (lambda: bert_tagger(torch.float32), None, torch.zeros(3, dtype=torch.long), r"al .* expects \[3, 7\]"),
        (lambda: tiny_bert(num_labels=2), "regression", torch.zeros(3), r"Normal likelihood expects \[3, 2\]"),
        (lambda: tiny_bert(), "multi_label_classification", torch.zeros(3), r"Bernoulli .* expects \[3, 3\]"),
    ],
    ids=["two classes a row", "one class a sentence", "one number of two", "one label of three"],
)  # fmt: skip
def test_labels_of_another_shape_are_refused(
    make: Callable[[], nn.Module], problem: str | None, labels: Tensor, message: str
) -> None:
    model = make()
    model.config.problem_type = problem
    noise_std = 1.0 if problem == "regression" else None
    with attach(model, subspace="last_layer", noise_std=noise_std) as bayesian:
        for options in ({}, {"theta": bayesian.theta}):
            with pytest.raises(ValueError, match=message):
                bayesian(**batch(), labels=labels, **options)
        with pytest.raises(ValueError, match=message):
            bayesian.evaluate_batch({**batch(), "labels": labels})


# -- taggers ---------------------------------------------------------------------------------------------------------


def test_a_taggers_terms_are_its_labels_unshifted(tmp_path: Path) -> None:
    rows = tagged_rows()
    labels = [label for row in rows for label in row["labels"]]
    unshifted = sum(label != -100 for label in labels)
    shifted = sum(label != -100 for row in rows for label in row["labels"][1:])
    trainer = run(tmp_path, bert_tagger(torch.float32), rows, rows, subspace="last_layer",
                  collator=runs.padding_collator(), minibatch="shared", per_device_train_batch_size=4)  # fmt: skip
    assert trainer.num_data == unshifted != shifted
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


# -- images ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("subspace", ["trainable", "last_layer"])
def test_an_image_classifier_trains_evaluates_saves_and_loads(tmp_path: Path, subspace: str) -> None:
    base = from_disk(tiny_vit(), tmp_path / "base")
    adapted = with_lora(base) if subspace == "trainable" else base
    held_out = image_rows(seed=5)
    trainer = run(tmp_path, adapted, image_rows(), held_out, subspace=subspace)
    assert trainer.num_data == 4
    trainer.train()
    found = trainer.evaluate()
    trainer.save_model()
    loaded = hf_bayes.BayesianModelForImageClassification.from_pretrained(tmp_path / "posterior")
    theta, layout = trainer.posterior.sample(None), trainer.bayesian.layout
    logits = separate_logits(trainer.bayesian.detach(), layout, theta, images(4, seed=5))
    expected = brute_force(logits.double().log_softmax(-1), torch.arange(4) % 3)
    assert {name: found[f"eval_{name}"] for name in METRICS} == pytest.approx(expected, rel=2e-5, abs=2e-6)
    with torch.no_grad():
        torch.testing.assert_close(loaded(**images(4, seed=5)).logits.double(), mixture(logits), rtol=0, atol=1e-5)


# -- regression ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outputs", [1, 2])
def test_a_regression_is_trained_evaluated_saved_and_loaded(tmp_path: Path, outputs: int) -> None:
    base = from_disk(tiny_bert(num_labels=outputs, problem_type="regression"), tmp_path / "base")
    held_out = numbered_rows(outputs, seed=5)
    trainer = run(tmp_path, with_lora(base), numbered_rows(outputs), held_out, noise_std=0.5)
    assert trainer.num_data == 6
    trainer.train()
    found = trainer.evaluate()
    trainer.save_model()
    loaded = BayesianModelForSequenceClassification.from_pretrained(tmp_path / "posterior")
    theta, layout = trainer.posterior.sample(None), trainer.bayesian.layout
    ids = torch.tensor([row["input_ids"] for row in held_out])
    means = separate_logits(trainer.bayesian.detach(), layout, theta, {"input_ids": ids}).double()
    labels = torch.tensor([row["label"] for row in held_out], dtype=torch.float64).view(6, outputs)
    log_probs = torch.distributions.Normal(means, 0.5).log_prob(labels).sum(-1)
    epistemic = ((means - means.mean(0)) ** 2).mean(0)
    figures = {
        "nll": (math.log(4) - log_probs.logsumexp(0)).mean(),
        "member_nll": -log_probs.mean(),
        "mse": ((means.mean(0) - labels) ** 2).mean(),
        "predictive_std": (0.25 + epistemic).sqrt().mean(),
        "epistemic_std": epistemic.sqrt().mean(),
    }
    expected = {name: float(value) for name, value in figures.items()}
    # float32 means; a variance is a difference
    assert {name: found[f"eval_{name}"] for name in expected} == pytest.approx(expected, rel=1e-4)
    assert loaded.likelihood.noise_std == 0.5
    with torch.no_grad():
        output = loaded(input_ids=ids)
    torch.testing.assert_close(output.logits.double(), means.mean(0), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(output.predictive_std.double(), (0.25 + epistemic).sqrt(), rtol=1e-5, atol=0)
    torch.testing.assert_close(output.epistemic_std.double(), epistemic.sqrt(), rtol=1e-4, atol=1e-6)


def test_predictive_std_is_that_of_draws_of_labels() -> None:
    model = tiny_bert(dtype=torch.float64, num_labels=1)
    theta = scattered(model, select(model, "last_layer"), num_members=8)
    with torch.no_grad(), attach(model, theta, subspace="last_layer", noise_std=0.5) as bayesian:
        output = bayesian(**batch())
        means = bayesian.member_logits(batch())
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn((8, 20_000, 3, 1), generator=generator, dtype=torch.float64)
    drawn = (means[:, None] + 0.5 * noise).flatten(0, 1)
    # the relative error of the standard deviation of n draws is sqrt((kurtosis - 1) / 4n): 4 of them at n = 160,000,
    # where the kurtosis of 8 equally likely numbers is below 6.2 and Gaussian noise brings it nearer to 3
    torch.testing.assert_close(output.predictive_std, drawn.std(0), rtol=4 * math.sqrt(5.2 / 640_000), atol=0)
    assert ((output.epistemic_std + 0.5) / drawn.std(0) > 1.02).all()  # the twin: standard deviations do not add


def test_predictions_without_labels_are_means_alone(tmp_path: Path) -> None:
    trainer = run(tmp_path, tiny_bert(num_labels=1), numbered_rows(1), numbered_rows(1), subspace="last_layer",
                  noise_std=0.5)  # fmt: skip
    rows = [{key: value for key, value in row.items() if key != "label"} for row in numbered_rows(1)]
    without = trainer.predict(Dataset.from_list(rows)).predictions
    np.testing.assert_allclose(without, trainer.predict(Dataset.from_list(numbered_rows(1))).predictions, atol=1e-6)
