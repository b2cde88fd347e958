"""Heads other than a language model's: from a trainer to a directory and back, against separate models."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hf_bayes
from hf_bayes import Heteroscedastic, Weighted
from hf_bayes.models.attaching import attach
from hf_bayes.models.classification import BayesianModelForSequenceClassification
from hf_bayes.models.image_classification import BayesianModelForImageClassification
from hf_bayes.models.token_classification import BayesianModelForTokenClassification
from tests import runs
from tests.members.reference import separate_logits
from tests.members.subject_models import bert_tagger, llama_tagger
from tests.models.trained import from_disk, run
from tests.tiny_models import batch, tiny_bert, tiny_llama, tiny_vit, with_lora


def numbered_rows(outputs: int, seed: int = 0) -> list[dict[str, Any]]:
    rows = runs.label_rows(6, seed=seed)
    values = torch.randn((6, outputs), generator=torch.Generator().manual_seed(seed)).tolist()
    return [{**row, "label": value if outputs > 1 else value[0]} for row, value in zip(rows, values, strict=True)]


def test_labels_of_two_classes_may_be_true_and_false() -> None:
    labels = torch.tensor([True, False, True])
    found: list[list[Tensor]] = []
    with attach(tiny_bert(num_labels=2), subspace="last_layer", num_members=2) as bayesian:
        for given in (labels, labels.long()):
            inputs = {**batch(), "labels": given}
            statistics, _ = bayesian.evaluate_batch(inputs)
            loss = bayesian.log_lik(bayesian.theta, inputs, folded=False).loss
            score = bayesian.likelihood.score(torch.arange(6.0).view(3, 2), given)
            tempered, _ = bayesian.read_predictions(inputs, lambda at, y: {"nll": at.nll_at_temperatures(y)})
            found.append([bayesian(**inputs).loss, loss, score, *tempered.values(), *statistics.values()])
    assert all(torch.equal(of_bool, of_long) for of_bool, of_long in zip(*found, strict=True))


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


# -- images ----------------------------------------------------------------------------------------------------------


# -- regression ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outputs", [1, 2])
def test_a_regression_is_trained_evaluated_saved_and_loaded(tmp_path: Path, outputs: int) -> None:
    base = from_disk(tiny_bert(num_labels=outputs, problem_type="regression"), tmp_path / "base")
    held_out = numbered_rows(outputs, seed=5)
    trainer = run(tmp_path, with_lora(base), numbered_rows(outputs), held_out, noise_std=0.5)
    assert trainer.rows.num_data == 6
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


def test_rows_without_weights_are_judged_as_those_of_weight_one() -> None:
    likelihood, inputs, labels = Weighted(Heteroscedastic()), batch(rows=3), torch.tensor([0.5, -1.0, 2.0])
    with torch.no_grad(), attach(tiny_bert(num_labels=2), subspace="last_layer", likelihood=likelihood) as model:
        expected = model.evaluate_batch({**inputs, "labels": torch.stack([labels, torch.ones(3)], 1)})[0]
        model.count_rows_once()
        found = model.evaluate_batch({**inputs, "labels": labels})[0]
        assert model.terms_per_row({**inputs, "labels": labels}).tolist() == [1, 1, 1]
        model.count_rows_once()  # there are no weights any more
        assert model.likelihood.name == "heteroscedastic"
    assert torch.equal(found["nll"], expected["nll"])


def test_a_tuple_is_given_and_outputs_of_layers_are_refused() -> None:
    with torch.no_grad(), attach(tiny_bert(num_labels=3), subspace="last_layer") as bayesian:
        found, output = (bayesian(**batch(), return_dict=value) for value in (False, True))
        assert isinstance(found, tuple)
        assert all(torch.equal(*pair) for pair in zip(found, output.to_tuple(), strict=True))
        for name in ("output_hidden_states", "output_attentions"):
            assert torch.equal(bayesian(**batch(), **{name: False}).logits, output.logits)
            with pytest.raises(ValueError, match=f"^{name}: hidden states and attentions differ"):
                bayesian(**batch(), **{name: True})
