"""Trials of a tuning: they are kept, and tried again if they failed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_bayes.training.repeated_runs import finished_run
from hf_bayes.training.tuning import trials as trials_module
from hf_bayes.training.tuning.tune import Tuning
from tests.training.tuning.tuned import CANDIDATES, call, only_failing


@pytest.mark.parametrize("error", [ValueError("no space"), torch.OutOfMemoryError("no space")])
def test_a_failed_run_is_tried_again_by_a_later_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    with monkeypatch.context() as patched:
        only_failing(patched, error, "ensemble")
        first = call(tmp_path, CANDIDATES[1:3], budget=800)
    assert {trial.failure for trial in first.kept if trial.name == "ensemble"} == {"no space"}
    assert "again" not in capsys.readouterr().out
    names = only_failing(monkeypatch, ValueError("finished"), "map")
    again = call(tmp_path, CANDIDATES[1:3], budget=800)
    assert names == ["ensemble", "ensemble"]
    assert not any(trial.failure for trial in again.kept)
    assert capsys.readouterr().out.count("ensemble failed in an earlier call (no space) and runs again") == 2


def test_a_posterior_that_is_gone_is_made_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = call(tmp_path, CANDIDATES[1:2], budget=200)
    shutil.rmtree(tmp_path / "finalists")
    again = call(tmp_path, CANDIDATES[1:2], budget=200)
    assert "plain fine-tuning runs again" in " ".join(capsys.readouterr().out.split())
    assert again.rounds == before.rounds
    assert torch.equal(again.posterior.approximation.theta, before.posterior.approximation.theta)


def test_the_cost_of_a_prediction_is_that_of_this_call(tuned: tuple[Path, Tuning]) -> None:
    directory, result = tuned
    costs = {trial.name: trial.cost for trial in result.rounds[0]}
    dear = call(directory, [candidate._replace(cost=candidate.cost + 6) for candidate in CANDIDATES])
    assert {trial.name: trial.cost - 6 for trial in dear.rounds[0]} == costs


def test_an_infinite_nll_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def run(*args: Any, **options: Any) -> Iterator[Any]:
        with finished_run(*args, **options) as trainer:
            evaluate = trainer.evaluate

            def of_one_lost_row() -> None:
                evaluate()
                trainer.outcome.evaluator.last["eval"].rows.nll[3] = float("inf")

            trainer.evaluate = of_one_lost_row
            yield trainer

    monkeypatch.setattr(trials_module, "finished_run", run)
    with pytest.raises(ValueError, match="plain fine-tuning: the NLL of 1 held-out rows is not a finite number"):
        call(tmp_path, CANDIDATES[1:2], budget=200)
