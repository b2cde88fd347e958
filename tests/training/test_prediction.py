"""A trainer's model predicts by its chains in a run, and afterwards as a model that is loaded from the posterior."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

from hf_bayes import LaplaceConfig, MAPConfig
from hf_bayes.training.prediction import by_members, by_members_from_now, predict_as_loaded, predict_by_members
from hf_bayes.training.trainer import BayesianTrainer
from tests import runs
from tests.tiny_models import tiny_bert


def trainer(directory: Path, **changes: Any) -> BayesianTrainer:
    """A run of Laplace whose posterior predicts linearised, with a temperature from its held-out rows."""
    return runs.trainer(
        directory, LaplaceConfig(prior_std=3.0), model=tiny_bert(), subspace="last_layer", max_steps=60,
        learning_rate=0.3, train=runs.label_rows(10),
        eval_dataset=Dataset.from_list(runs.label_rows(80, seed=5)), **changes,
    )  # fmt: skip


def answer(run: BayesianTrainer) -> torch.Tensor:
    ids = torch.tensor([row["input_ids"] for row in runs.label_rows(4, seed=9)])
    with torch.no_grad():
        logits: torch.Tensor = run.bayesian(input_ids=ids).logits
    return logits


def test_a_second_run_does_not_see_how_the_first_predicts(tmp_path: Path) -> None:
    runs_of_two = trainer(tmp_path / "linearised"), trainer(tmp_path / "members")
    for run in runs_of_two:
        run.train()
    predict_by_members(runs_of_two[1].bayesian)
    for run in runs_of_two:
        run.train()
    one, other = runs_of_two
    assert one.bayesian.is_linearised
    assert runs.equal(one.posterior.approximation, other.posterior.approximation)
    assert one.posterior.config.calibration == other.posterior.config.calibration
    assert torch.equal(answer(one), answer(other))


def test_a_refused_run_leaves_the_predictions_of_the_one_before(tmp_path: Path) -> None:
    run = trainer(tmp_path, save_strategy="steps", save_steps=30)
    run.train()
    before = answer(run)
    run.args.seed = 1
    with pytest.raises(ValueError, match="belongs to another run: seed"):
        run.train(resume_from_checkpoint=True)
    assert torch.equal(answer(run), before)
    assert run.bayesian.calibrated


def test_predictions_by_members_end_with_their_block(tmp_path: Path) -> None:
    run = trainer(tmp_path)
    run.train()
    before, temperature = answer(run), run.bayesian.mixture_temperature
    assert temperature != 1
    with by_members(run.bayesian):
        assert not run.bayesian.is_linearised
        assert run.bayesian.mixture_temperature == 1
        assert not torch.equal(answer(run), before)
    assert torch.equal(answer(run), before)
    assert run.bayesian.mixture_temperature == temperature


def test_members_predict_from_now_on_unless_an_error_comes(tmp_path: Path) -> None:
    run = trainer(tmp_path)
    run.train()
    with pytest.raises(KeyError), by_members_from_now(run.bayesian):
        raise KeyError
    assert run.bayesian.is_linearised
    with by_members_from_now(run.bayesian):
        pass
    assert not run.bayesian.is_linearised


def test_shown_members_get_the_temperature_of_the_posterior(tmp_path: Path) -> None:
    run = runs.trainer(
        tmp_path, MAPConfig(prior_std=3.0), model=tiny_bert(), subspace="last_layer", max_steps=60, learning_rate=0.3,
        train=runs.label_rows(10), eval_dataset=Dataset.from_list(runs.label_rows(80, seed=5)),
    )  # fmt: skip
    run.train()
    temperature = run.posterior.config.calibration["temperature"]
    run.bayesian.show(run.bayesian.current)  # at temperature 1
    predict_as_loaded(run.bayesian, run.posterior)
    assert run.bayesian.mixture_temperature == temperature != 1
