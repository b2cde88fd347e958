from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from transformers import EvalPrediction, TrainerCallback

from hf_bayes.cli.diagnosis_figure import plot
from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from hf_bayes.posteriors.posterior import Posterior
from tests import runs
from tests.tiny_models import tiny_bert, with_lora
from tests.training.trained import METRICS


class ReadsLoss(TrainerCallback):
    """A callback that reads ``eval_loss``, as many do, and keeps the names of its calls."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, float], **kwargs: Any) -> None:
        assert metrics["eval_loss"] > 0
        self.told.append("evaluate")

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.told.append("prediction step")

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.told.append("log")


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("evaluates", [False, True])
def test_figures_that_a_save_makes_for_itself_reach_nobody_else(tmp_path, several, evaluates):
    seen: list[EvalPrediction] = []
    watch = ReadsLoss()
    rows = runs.token_rows(4, seed=1)
    trainer = runs.trainer(
        tmp_path,
        SGHMCConfig(num_chains=4, draws_per_chain=2),
        eval_dataset={"first": rows[:3], "second": rows[2:]} if several else rows,
        callbacks=[] if several else [watch],
        compute_metrics=lambda prediction: seen.append(prediction) or {},
    )
    trainer.train()
    expected = trainer.evaluate() if evaluates else None
    watch.told.clear()
    seen.clear()
    logged = len(trainer.state.log_history)
    trainer.save_model()
    assert (watch.told, seen, len(trainer.state.log_history)) == ([], [], logged)
    loaded = Posterior.from_pretrained(tmp_path)
    kept, risk = loaded.config.metrics, loaded.trace["risk"]
    sets = ["first_", "second_"] if several else [""]
    assert all(np.isfinite(kept[f"{name}map_nll"]) for name in sets)
    assert [name for name in kept if name.endswith("limit_nll")] == [f"{sets[-1]}limit_nll"]  # of the last set only
    assert kept[f"{sets[-1]}limit_nll"] == risk["limit"]  # of 8 members
    assert risk["risks"][-1] == pytest.approx(kept[f"{sets[-1]}nll"], rel=1e-6)
    assert risk.get("eval_set", "") == sets[-1][:-1]
    titles = [axis.get_title() for axis in plot(loaded.config.to_dict(), loaded.trace).axes]
    assert f"held-out NLL of S members{' (second)' if several else ''}" in titles
    found = trainer.evaluate()
    for name in [name + metric for name in sets for metric in METRICS]:
        assert kept[name] == pytest.approx(found[f"eval_{name}"], rel=1e-6)
        assert expected is None or kept[name] == expected[f"eval_{name}"]
    # and who was left out is back
    assert seen
    assert several or "evaluate" in watch.told


def test_a_failed_evaluation_loses_no_posterior(tmp_path, monkeypatch, caplog):
    watch = ReadsLoss()
    trainer = runs.trainer(
        tmp_path,
        SGHMCConfig(),
        eval_dataset=runs.token_rows(4, seed=1),
        callbacks=[watch],
        compute_metrics=lambda _: {},
    )
    trainer.train()
    kept = trainer.callback_handler, trainer.compute_metrics

    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(type(trainer.bayesian), "evaluate_batch", fail)
        trainer.save_model()
        patched.setattr(trainer.setup.mesh, "num_processes", 2)  # the other one may wait in the evaluation
        with pytest.raises(RuntimeError, match="out of memory"):
            trainer.save_model()
    assert "saved without its metrics, because its evaluation failed: out of memory" in caplog.text
    assert not Posterior.from_pretrained(tmp_path).config.metrics
    assert (trainer.callback_handler, trainer.compute_metrics) == kept
    trainer.save_model()
    assert "map_nll" in Posterior.from_pretrained(tmp_path).config.metrics


def test_metrics_of_several_eval_sets_are_kept_by_name(tmp_path):
    sets = {name: Dataset.from_list(runs.token_rows(3, seed=seed)) for seed, name in enumerate(("near", "far"))}
    trainer = runs.trainer(tmp_path, SGHMCConfig(num_chains=2, warm_start_steps=2), eval_dataset=sets)
    trainer.train()
    trainer.save_model()
    kept = trainer.posterior.config.metrics
    assert {"near_nll", "far_nll", "near_map_nll", "far_map_nll", "far_epistemic"} <= kept.keys()


@pytest.mark.parametrize("reason", ["no row", "no labels", "all ignored", "no full batch"])
@pytest.mark.parametrize("several", [False, True])
def test_held_out_rows_without_a_term_lose_no_posterior(tmp_path, caplog, reason, several):
    rows = runs.label_rows(4, seed=1)
    unlabelled = [{name: value for name, value in row.items() if name != "label"} for row in rows]
    empty = {
        "no row": Dataset.from_list(rows).select([]),
        "no labels": Dataset.from_list(unlabelled),
        "all ignored": Dataset.from_list([{**row, "label": -100} for row in rows]),
        "no full batch": Dataset.from_list(rows[:2]),
    }[reason]
    trainer = runs.trainer(
        tmp_path,
        SGHMCConfig(num_chains=2, warm_start_steps=2),
        model=with_lora(tiny_bert()),
        train=runs.label_rows(8),
        eval_dataset={"near": Dataset.from_list(rows), "far": empty} if several else empty,
        eval_strategy="steps",
        eval_steps=3,
        dataloader_drop_last=reason == "no full batch",
    )
    trainer.train()
    trainer.save_model()
    assert f"no likelihood term in eval_dataset{' ' + repr('far') if several else ''}, so" in caplog.text
    assert runs.equal(Posterior.from_pretrained(tmp_path).approximation, trainer.posterior.approximation)
    kept = trainer.posterior.config.metrics
    assert not any(name.startswith("far_") for name in kept)
    assert {"near_nll", "near_map_nll"} <= kept.keys() if several else not kept


@pytest.mark.parametrize("several", [False, True])
def test_figures_of_compute_metrics_replace_none_of_ours(tmp_path, several):
    rows = runs.token_rows(4, seed=1)
    trainer = runs.trainer(
        tmp_path,
        SGHMCConfig(num_chains=2),
        eval_dataset={"near": rows[:2], "far": rows[2:]} if several else rows,
        compute_metrics=lambda _: {"nll": 5.0, "ece": 9.0, "perplexity": -1.0, "mse": 3.0},
    )
    trainer.train()
    name = "far_" if several else ""
    assert trainer.evaluate()[f"eval_{name}nll"] == 5.0
    trainer.save_model()
    kept, own = trainer.posterior.config.metrics, trainer.outcome.evaluator.last[f"eval_{name}"[:-1]].metrics
    assert all(kept[name + metric] == own[metric] != 5.0 for metric in ("nll", "ece", "perplexity"))
    assert f"{name}mse" not in kept  # of a regression
