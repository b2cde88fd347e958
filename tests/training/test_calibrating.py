"""The temperature of the mixture that a trainer fits at the end of a run."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset

from hf_bayes import BayesianModelForSequenceClassification, MCDropoutConfig, Posterior, SGHMCConfig
from hf_bayes.methods.averaging.ensemble import EnsembleConfig
from hf_bayes.methods.averaging.map import MAPConfig
from hf_bayes.methods.laplace.laplace import LaplaceConfig
from hf_bayes.metrics.calibration import Calibration
from hf_bayes.training.calibrating import LEAST_ROWS, report_length
from hf_bayes.training.trainer import BayesianTrainer
from hf_bayes.uncertainty.custom.weighted import Weighted
from tests import runs
from tests.tiny_models import tiny_bert
from tests.training.trained import StopAfter


def trainer(directory: Path, method: Any = None, rows: Any = 80, **changes: Any) -> BayesianTrainer:
    """Ten rows of random labels, learnt by heart."""
    return runs.trainer(
        directory, method or EnsembleConfig(num_chains=3, prior_std=3.0), model=tiny_bert(), subspace="last_layer",
        train=runs.label_rows(10), eval_dataset=runs.label_rows(rows, seed=5) if isinstance(rows, int) else rows,
        **{"max_steps": 60, "learning_rate": 0.3, **changes},
    )  # fmt: skip


def test_a_run_ends_with_a_temperature_that_predictions_use(tmp_path: Path) -> None:
    run = trainer(tmp_path)
    before = run.evaluate()["eval_nll"]
    run.train()
    stored = run.posterior.config.calibration
    assert stored["temperature"] > 1.2
    assert run.evaluate()["eval_nll"] < stored["nll"] < before + 100
    run.save_model()
    saved = Posterior.from_pretrained(tmp_path)
    assert saved.config.calibration == stored
    with BayesianModelForSequenceClassification.from_pretrained(saved, base_model=tiny_bert()) as model:
        assert model.mixture_temperature == run.bayesian.mixture_temperature == stored["temperature"]
    card = (tmp_path / "README.md").read_text()
    assert f"{stored['nll']:.4f}" in card
    assert f"{stored['calibrated_nll']:.4f}" in card


@pytest.mark.parametrize(
    ("method", "t", "log_std_error", "says"),
    [
        (EnsembleConfig(), 0.94, 0.02, "A longer run"),
        (EnsembleConfig(), 0.94, 0.04, None),  # within two standard errors
        (EnsembleConfig(), 0.96, 0.0, None),
        (EnsembleConfig(), 1.11, 0.02, "A shorter run"),
        (EnsembleConfig(), 1.11, 0.06, None),
        (EnsembleConfig(), 1.09, 0.0, None),
        (SGHMCConfig(temperature=0.1), 0.5, 0.02, "A longer run"),
        (SGHMCConfig(temperature=0.3), 0.5, 0.02, None),  # the posterior is wide
        (MCDropoutConfig(), 0.5, 0.02, None),
    ],
)
def test_networks_that_are_not_sure_enough_need_a_longer_run(
    method: Any, t: float, log_std_error: float, says: str | None
) -> None:
    found = Calibration(
        temperature=t, log_std_error=log_std_error, nll=1.0, calibrated_nll=0.9, nll_std_error=0.01, num_terms=100,
        num_members=4, prediction="members",
    )  # fmt: skip
    heard: list[str] = []
    report_length(method, found, SimpleNamespace(say=lambda message, *values: heard.append(message % values)))
    assert [says in text and f"{t:.3g}" in text for text in heard] == ([True] if says else [])


def test_map_with_a_temperature_is_a_method(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = trainer(tmp_path, MAPConfig(prior_std=3.0))
    with caplog.at_level(logging.INFO, logger="hf_bayes"):
        run.train()
    assert run.posterior.config.calibration["temperature"] > 1.2
    assert "A shorter run probably predicts better" in caplog.text  # it has learnt ten rows by heart


def test_the_fit_takes_all_rows_that_a_tenth_of_the_run_pays(tmp_path: Path) -> None:
    run = trainer(tmp_path, rows=300, max_steps=400)
    run.train()
    rows = 0.3 * 400 * run.args.per_device_train_batch_size  # as many members as chains
    assert 200 < rows < 300
    assert run.posterior.config.calibration["num_terms"] == rows


def test_after_an_early_stop_the_fit_takes_fewer_rows(tmp_path: Path) -> None:
    run = trainer(tmp_path, rows=300, max_steps=400, callbacks=[StopAfter(20)])
    run.train()
    assert run.posterior.config.calibration["num_terms"] == LEAST_ROWS  # 20 updates pay for 12 rows


def test_the_map_estimate_beside_has_its_own_temperature(tmp_path: Path) -> None:
    run = trainer(tmp_path)
    run.train()
    run.save_model()
    plain = trainer(tmp_path / "plain", calibrate=False)
    plain.train()
    plain.save_model()
    assert not plain.posterior.config.calibration
    assert run.posterior.config.metrics["map_nll"] < plain.posterior.config.metrics["map_nll"] - 0.05


def test_a_second_run_begins_without_the_firsts_temperature(tmp_path: Path) -> None:
    found = []
    for calibrate in (True, False):
        run = trainer(tmp_path, eval_strategy="steps", eval_steps=20, max_steps=20, calibrate=calibrate)
        run.train(), run.train()
        found.append([log["eval_nll"] for log in run.state.log_history if "eval_nll" in log])
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("rows", "changes", "reason"),
    [
        (80, {"calibrate": False}, None),
        (None, {}, "there is no eval_dataset"),
        (20, {}, "at least 50 labels, got 20"),
        ({"near": Dataset.from_list(runs.label_rows(80))}, {}, r"several sets \(near\) and none is named 'heldout'"),
        (Dataset.from_list(runs.label_rows(80)).to_iterable_dataset(), {}, "eval_dataset is a stream"),
    ],
)
def test_what_cannot_be_calibrated_is_left_or_refused(tmp_path: Path, rows: Any, changes: Any, reason: Any) -> None:
    run = trainer(tmp_path, rows=rows, max_steps=4, **changes)
    run.train()
    assert not run.posterior.config.calibration
    if reason is not None:
        with pytest.raises(ValueError, match=reason):
            trainer(tmp_path / "asked", rows=rows, max_steps=4, calibrate=True)


@pytest.mark.parametrize("likelihood", [None, Weighted()])
def test_numbers_have_no_temperature_with_weights_either(tmp_path: Path, likelihood: Weighted | None) -> None:
    rows = [{**row, "label": float(row["label"]), "weight": 1.0} for row in runs.label_rows(80)]
    with pytest.raises(ValueError, match=r"calibrate=True fits a temperature .* the labels are numbers"):
        runs.trainer(
            tmp_path, SGHMCConfig(), model=tiny_bert(num_labels=1), subspace="last_layer", train=rows, noise_std=0.5,
            eval_dataset=rows, likelihood=likelihood, calibrate=True,
        )  # fmt: skip


def test_of_several_sets_the_one_named_heldout_calibrates(tmp_path: Path) -> None:
    sets = {"far": Dataset.from_list(runs.label_rows(80)), "heldout": Dataset.from_list(runs.label_rows(80, seed=5))}
    run, alone = trainer(tmp_path, rows=sets), trainer(tmp_path / "alone")
    run.train(), alone.train()
    assert run.posterior.config.calibration == alone.posterior.config.calibration


@pytest.mark.parametrize("calibrate", [False, None])
def test_a_laplace_run_is_evaluated_as_it_predicts_when_loaded(tmp_path: Path, calibrate: bool | None) -> None:
    """Linearised, not by draws from the Gaussian."""
    held = runs.label_rows(80, seed=5)
    run = trainer(tmp_path, LaplaceConfig(prior_std=3.0), rows=Dataset.from_list(held), calibrate=calibrate)
    run.train()
    members = run.bayesian.current
    assert run.posterior.config.prediction.startswith("linearised")
    found = run.evaluate()["eval_nll"]
    with run.bayesian.showing(members):
        by_draws = float(run.bayesian(**batch_of(held)).loss)
    run.save_model()
    with BayesianModelForSequenceClassification.from_pretrained(tmp_path, base_model=tiny_bert()) as model:
        as_loaded = float(model(**batch_of(held)).loss)
    assert found == pytest.approx(as_loaded, rel=1e-5)  # float32
    assert run.posterior.config.metrics["nll"] == pytest.approx(found)
    assert abs(by_draws - as_loaded) > 1e-3  # the twin: what an evaluation by draws would find
    assert run.bayesian.current is members


def batch_of(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return {
        name: torch.tensor([row[key] for row in rows])
        for name, key in (("input_ids", "input_ids"), ("attention_mask", "attention_mask"), ("labels", "label"))
        if key in rows[0]
    }
