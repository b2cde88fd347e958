"""Runs with a ladder that are stopped before their end."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from tests.methods.ladder_runs import CHOICE, LADDER, STEPS, config, trainer
from tests.training.trained import StopAfter


def test_a_run_stopped_before_the_choice_reports_no_choice(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hf_bayes.training.trainer")
    for step in (3, CHOICE):  # after the last of these the next update would begin with the choice
        run = trainer(tmp_path, config(draws_per_chain=1))
        run.add_callback(StopAfter(step))
        run.train()
        found = run.posterior.config
        assert not [name for name in found.diagnostics if name.startswith("ladder")]
        assert found.diagnostics["chosen_temperature"] is None
        assert found.diagnostics["verdict"].startswith(f"stopped at update {step} of {STEPS}, before sampling: these")
        assert found.method["ladder"] == LADDER
        assert torch.equal(run.posterior.approximation.theta, run.run.theta)
    for words in ("ladder's rungs", "draws are of", "when T was chosen"):
        assert words not in caplog.text


def test_a_choice_before_a_stop_is_told_but_no_draws_are(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "hf_bayes.training.trainer")
    monkeypatch.setattr("hf_bayes.training.reports.own_choices.MAX_DEPARTURE", 0.0)
    for step, sampled in ((CHOICE + 1, False), (STEPS - 1, True)):
        caplog.clear()
        run = trainer(tmp_path, config())
        run.add_callback(StopAfter(step))
        run.train()
        found = run.posterior.config
        assert min(found.diagnostics["ladder_nll"]) > 0
        assert found.method["ladder"] is None
        assert len(found.diagnostics["ladder_drawn_at"]) == 1
        assert "held-out nats of the ladder's rungs: T = 1" in caplog.text
        assert ("the draws are of" in caplog.text) is sampled
        assert ("under the chains when T was chosen" in caplog.text) is sampled
