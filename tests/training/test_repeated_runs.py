"""Runs that follow each other on one model."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from hf_bayes import MAPConfig, attach
from hf_bayes.training.repeated_runs import finished_run, require_repeatable
from tests import runs
from tests.tiny_models import tiny_bert

GIVEN = {"train_dataset": runs.label_rows(4), "subspace": "last_layer"}


def test_a_run_changes_neither_its_arguments_nor_the_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, args = tiny_bert(), runs.arguments(tmp_path)
    with (
        caplog.at_level(logging.INFO, "hf_bayes"),
        finished_run(model, MAPConfig(), args, given=GIVEN, max_steps=3) as run,
    ):
        assert run.state.global_step == 3
        assert run.posterior.config.method["name"] == "map"
    assert args.max_steps == 6
    assert not caplog.records
    assert logging.getLogger("hf_bayes").level != logging.ERROR
    attach(model, subspace="last_layer").detach()  # it was given back


def test_a_failure_gives_the_model_back(tmp_path: Path) -> None:
    model = tiny_bert()
    with (
        pytest.raises(RuntimeError, match="later"),
        finished_run(model, MAPConfig(), runs.arguments(tmp_path), given=GIVEN),
    ):
        raise RuntimeError("later")
    attach(model, subspace="last_layer").detach()


def test_an_attached_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="choose attaches the model anew for each run, got an attached Bayesian"):
        require_repeatable("choose", attach(tiny_bert(), subspace="last_layer"), runs.arguments(tmp_path))
