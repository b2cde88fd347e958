from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from torch import Tensor
from transformers import EvalPrediction, TrainerCallback, default_data_collator

from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from tests import runs
from tests.tiny_models import tiny_bert, tiny_llama, with_lora
from tests.training.trained import METRICS

LENGTHS = [8, 3, 12, 5, 9, 2, 11]


def masked_rows() -> list[dict]:
    rows = runs.token_rows(LENGTHS, seed=3)
    rows[2]["labels"] = [-100] * 7 + rows[2]["labels"][7:]
    return rows


def causal_lm(tmp_path: Any, **changes: Any) -> Any:
    return runs.trainer(
        tmp_path,
        SGHMCConfig(num_chains=3, init_jitter=1.0),
        model=with_lora(tiny_llama()),
        collator=runs.padding_collator(),
        **{"eval_dataset": masked_rows(), **changes},
    )


def classifier(tmp_path: Any, **changes: Any) -> Any:
    return runs.trainer(
        tmp_path,
        SGHMCConfig(num_chains=3, init_jitter=1.0),
        model=tiny_bert(),
        subspace="last_layer",
        train=runs.label_rows(10),
        eval_dataset=runs.label_rows(7, seed=3),
        **changes,
    )


def member_log_probs(trainer: Any, build: Any, rows: list[dict], theta: Tensor) -> Tensor:
    """[M, terms, V] in float64, row by row and member by member through plain models."""
    layout, members = trainer.bayesian.layout, []
    for row_of_theta in theta:
        model = build()
        parameters = dict(model.named_parameters())
        for name, value in layout.unflatten(row_of_theta).items():
            parameters[name].data.copy_(value)
        pieces = []
        for row in rows:
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([row["input_ids"]])).logits[0]
            is_term = [label != -100 for label in row["labels"][1:]] if "labels" in row else None
            pieces.append(logits[None] if is_term is None else logits[:-1][torch.tensor(is_term)])
        members.append(torch.cat(pieces))
    return torch.stack(members).double().log_softmax(-1)


def brute_force(log_probs: Tensor, labels: Tensor) -> dict[str, float]:
    """Every metric from its definition, in float64."""
    probs = log_probs.exp()
    mixture = probs.mean(0)
    index = torch.arange(len(labels))
    confidence, predicted = mixture.max(1)
    correct = (predicted == labels).double()
    ece = 0.0
    for low in range(15):
        inside = (confidence > low / 15) & (confidence <= (low + 1) / 15)
        if inside.any():
            ece += float(inside.sum()) / len(labels) * abs(float(correct[inside].mean() - confidence[inside].mean()))
    total = -(mixture * mixture.log()).sum(1).mean()
    aleatoric = -(probs * log_probs).sum(2).mean()
    return {
        "nll": float(-mixture[index, labels].log().mean()),
        "accuracy": float(correct.mean()),
        "ece": ece,
        "brier": float((mixture - torch.nn.functional.one_hot(labels, mixture.shape[1])).square().sum(1).mean()),
        "total": float(total),
        "aleatoric": float(aleatoric),
        "epistemic": float(total - aleatoric),
        "member_nll": float(-log_probs[:, index, labels].mean()),
    }


@pytest.mark.parametrize("batch_size", [1, 3, 7])
def test_metrics_of_a_language_model_weigh_every_token_alike(tmp_path, batch_size):
    rows = masked_rows()
    trainer = causal_lm(tmp_path, per_device_eval_batch_size=batch_size)
    found = trainer.evaluate()
    log_probs = member_log_probs(trainer, lambda: with_lora(tiny_llama()), rows, runs.origin(trainer))
    labels = torch.tensor([label for row in rows for label in row["labels"][1:] if label != -100])
    expected = brute_force(log_probs, labels)
    # float32 logits; epistemic is a difference
    assert {name: found[f"eval_{name}"] for name in METRICS} == pytest.approx(expected, rel=2e-5, abs=2e-6)
    assert found["eval_loss"] == found["eval_nll"]
    assert found["eval_perplexity"] == pytest.approx(np.exp(expected["nll"]), rel=1e-4)


LABELS: dict[str, tuple[Any, Any, Any, str]] = {
    "a language model": (lambda: with_lora(tiny_llama()), [5] * 8, [5] * 7 + [320], "outside 0..319 .*: \\[320\\]"),
    "a class too many": (tiny_bert, 2, 3, "outside 0..2 .*: \\[3\\]"),
    "a class below 0": (tiny_bert, 2, -1, "outside 0..2 .*: \\[-1\\]"),
    "several labels": (
        lambda: tiny_bert(problem_type="multi_label_classification"), [0, 1, 1], [0, 1, -100], "outside 0 to 1 .*-100"
    ),
    "a number": (lambda: tiny_bert(num_labels=1), 0.5, float("inf"), "outside the finite numbers: \\[inf\\]"),
}  # fmt: skip
"""A head -> its model, a label, a label without a likelihood, and words of the error."""


@pytest.mark.parametrize("head", LABELS)
def test_a_label_without_a_likelihood_is_refused_everywhere(tmp_path, head):
    build, good, wrong, words = LABELS[head]
    rows = [{**row, "labels": good} for row in runs.token_rows(4)]
    asked = [*rows[:2], {**rows[2], "labels": wrong}, rows[3]]
    trainer = runs.trainer(
        tmp_path,
        SGHMCConfig(),
        model=build(),
        train=rows,
        subspace="trainable" if "language" in head else "last_layer",
        noise_std=1.0 if head == "a number" else None,
        per_device_eval_batch_size=4,
    )
    assert np.isfinite(trainer.evaluate(Dataset.from_list(rows))["eval_nll"])
    with pytest.raises(ValueError, match=f"row 2 of the batch has a label {words}"):
        trainer.evaluate(asked)
    with pytest.raises(ValueError, match=f"row 2 of the batch has a label {words}"):
        trainer.bayesian(**default_data_collator(asked))


def test_mean_of_batch_means_is_caught(tmp_path):
    """The twin: transformers' eval_loss, a mean of batch means."""
    rows = masked_rows()
    trainer = causal_lm(tmp_path, per_device_eval_batch_size=1)
    twin = np.mean([trainer.evaluate(Dataset.from_list([row]))["eval_nll"] for row in rows])
    assert abs(trainer.evaluate()["eval_nll"] - twin) > 1e-3


@pytest.mark.parametrize("batch_size", [2, 7])
def test_metrics_of_a_classifier_are_those_of_its_examples(tmp_path, batch_size):
    trainer = classifier(tmp_path, per_device_eval_batch_size=batch_size)
    found = trainer.evaluate()
    rows = runs.label_rows(7, seed=3)
    log_probs = member_log_probs(trainer, tiny_bert, rows, runs.origin(trainer))[..., :]
    expected = brute_force(log_probs.view(3, 7, -1), torch.tensor([row["label"] for row in rows]))
    assert {name: found[f"eval_{name}"] for name in METRICS} == pytest.approx(expected, rel=2e-5, abs=2e-6)
    assert "eval_perplexity" not in found


def test_members_in_several_passes_give_the_same_metrics(tmp_path):
    expected = causal_lm(tmp_path).evaluate()
    for members_per_pass in (1, 2):
        found = causal_lm(tmp_path, members_per_pass=members_per_pass).evaluate()
        assert {n: found[f"eval_{n}"] for n in METRICS} == pytest.approx(
            {n: expected[f"eval_{n}"] for n in METRICS}, rel=1e-5
        )


def test_a_batch_without_a_term_counts_for_nothing(tmp_path):
    rows = masked_rows()
    silent = [{**row, "labels": [-100] * len(row["labels"])} for row in rows[:2]]
    expected = causal_lm(tmp_path).evaluate()
    found = causal_lm(tmp_path, eval_dataset=[*silent, *rows], per_device_eval_batch_size=2).evaluate()
    assert {n: found[f"eval_{n}"] for n in METRICS} == pytest.approx(
        {n: expected[f"eval_{n}"] for n in METRICS}, rel=1e-5
    )


def test_compute_metrics_gets_the_mixtures_log_probabilities(tmp_path):
    seen: list[EvalPrediction] = []

    def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
        seen.append(prediction)
        return {"answer": 42.0}

    trainer = causal_lm(tmp_path, compute_metrics=compute_metrics)
    metrics = trainer.evaluate()
    assert metrics["eval_answer"] == 42.0
    logits, labels = torch.tensor(seen[0].predictions), torch.tensor(seen[0].label_ids)
    assert logits.shape[:2] == labels.shape == (len(LENGTHS), max(LENGTHS))
    terms = labels[:, 1:] != -100
    chosen = logits[:, :-1][terms].log_softmax(-1).gather(-1, labels[:, 1:][terms][:, None])
    assert float(-chosen.mean()) == pytest.approx(metrics["eval_nll"], rel=1e-5)
    # normalised already: softmax changes nothing
    assert logits[:, :-1][terms].logsumexp(-1).abs().max() < 1e-5


@pytest.mark.parametrize("prefix", ["test", "held_out"])
def test_predict_returns_the_mixtures_log_probabilities(tmp_path, prefix):
    trainer = classifier(tmp_path)
    rows = runs.label_rows(7, seed=3)
    output = trainer.predict(Dataset.from_list(rows), metric_key_prefix=prefix)
    log_probs = member_log_probs(trainer, tiny_bert, rows, runs.origin(trainer)).view(3, 7, -1)
    expected = log_probs.exp().mean(0).log().numpy()
    np.testing.assert_allclose(output.predictions, expected, atol=1e-5)
    assert output.metrics[f"{prefix}_nll"] == pytest.approx(trainer.evaluate()["eval_nll"])


def test_predict_without_labels_returns_equal_log_probabilities(tmp_path):
    trainer = classifier(tmp_path)
    rows = runs.label_rows(7, seed=3)
    expected = trainer.predict(Dataset.from_list(rows)).predictions
    output = trainer.predict(Dataset.from_list([{k: v for k, v in row.items() if k != "label"} for row in rows]))
    np.testing.assert_allclose(output.predictions, expected, atol=1e-6)
    assert output.label_ids is None
    assert "test_nll" not in output.metrics


def test_a_single_prediction_step_answers_and_keeps_nothing(tmp_path):
    trainer = causal_lm(tmp_path)
    inputs = runs.padding_collator()(masked_rows()[:3])
    for _ in range(2):
        loss, logits, labels = trainer.prediction_step(trainer.model, inputs, prediction_loss_only=False)
    output = trainer.bayesian(**inputs)
    torch.testing.assert_close(loss, output.loss)
    torch.testing.assert_close(logits, output.logits)
    assert torch.equal(labels, inputs["labels"])
    assert trainer.outcome.evaluator._batches is None
    expected = causal_lm(tmp_path).evaluate()
    assert trainer.evaluate()["eval_nll"] == expected["eval_nll"]


def test_evaluation_without_compute_metrics_keeps_no_logits(tmp_path, monkeypatch):
    trainer = causal_lm(tmp_path)
    asked = []
    evaluate_batch = type(trainer.bayesian).evaluate_batch

    def watched(self: Any, inputs: dict, *, keep_logits: bool = False) -> Any:
        asked.append(keep_logits)
        return evaluate_batch(self, inputs, keep_logits=keep_logits)

    monkeypatch.setattr(type(trainer.bayesian), "evaluate_batch", watched)
    trainer.evaluate()
    assert asked == [False] * 3


class Watch(TrainerCallback):
    """A record of the members that the model shows while it is evaluated."""

    def __init__(self) -> None:
        self.shown: list[Tensor] = []

    def on_evaluate(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
        self.shown.append(model.current.detach().clone())


def test_evaluation_shows_chains_first_and_the_posterior_after(tmp_path):
    watch = Watch()
    trainer = runs.trainer(
        tmp_path,
        SGHMCConfig(num_chains=3, draws_per_chain=2),
        eval_dataset=runs.token_rows(4, seed=1),
        callbacks=[watch],
        eval_strategy="steps",
        eval_steps=2,
        eval_on_start=True,
    )
    before = trainer.evaluate()["eval_nll"]
    trainer.train()
    after = trainer.evaluate()["eval_nll"]
    # before training, at its start, after updates 2, 4 and 6, at the end
    assert [len(theta) for theta in watch.shown] == [3, 3, 3, 3, 3, 6]
    assert torch.equal(watch.shown[0], runs.origin(trainer))
    assert torch.equal(watch.shown[1], runs.origin(trainer))
    assert torch.equal(watch.shown[4], trainer.run.draws[-1])
    assert torch.equal(watch.shown[5], trainer.posterior.sample(None))
    assert before != after
    logged = [entry["eval_nll"] for entry in trainer.state.log_history if "eval_nll" in entry]
    assert len(set(logged)) >= 4


def test_evaluation_does_not_disturb_the_chains(tmp_path):
    def theta(**changes: Any) -> Tensor:
        trainer = runs.trainer(
            tmp_path,
            SGHMCConfig(num_chains=2),
            eval_dataset=runs.token_rows(4, seed=1),
            gradient_accumulation_steps=2,
            **changes,
        )
        trainer.train()
        return trainer.posterior.approximation.theta

    assert torch.equal(theta(), theta(eval_strategy="steps", eval_steps=1))


def test_mean_field_evaluates_draws_after_training(tmp_path):
    from hf_bayes.methods.variational.mean_field import MeanFieldConfig

    trainer = runs.trainer(tmp_path, MeanFieldConfig(num_chains=2), eval_dataset=runs.token_rows(4, seed=1))
    trainer.train()
    assert trainer.bayesian.num_members == 10
    assert trainer.evaluate()["eval_epistemic"] > 0


def test_bf16_evaluation_agrees_to_its_precision(tmp_path):
    expected, found = causal_lm(tmp_path).evaluate(), causal_lm(tmp_path, bf16=True).evaluate()
    assert found["eval_nll"] == pytest.approx(expected["eval_nll"], rel=0.02)


@pytest.mark.parametrize("members", [1, 3])
def test_epistemic_uncertainty_is_zero_for_one_member_only(tmp_path, members):
    trainer = runs.trainer(
        tmp_path, SGHMCConfig(num_chains=members, init_jitter=1.0), eval_dataset=runs.token_rows(4, seed=1)
    )
    found = trainer.evaluate()
    assert (found["eval_epistemic"] == 0) == (members == 1)
    assert found["eval_total"] == pytest.approx(found["eval_aleatoric"] + found["eval_epistemic"], rel=1e-6)


def test_a_figure_of_compute_metrics_keeps_its_own_value(tmp_path):
    trainer = causal_lm(tmp_path, compute_metrics=lambda prediction: {"nll": 7.0, "own": 3.0})
    metrics = trainer.evaluate()
    assert (metrics["eval_nll"], metrics["eval_own"]) == (7, 3)
    assert metrics["eval_loss"] == trainer.evaluate()["eval_loss"] != 7
