from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_bayes import EnsembleConfig
from hf_bayes.cli.diagnosis_figure import plot
from hf_bayes.cli.main import main
from hf_bayes.posteriors.posterior import Posterior
from tests.runs import token_rows
from tests.training.diagnosed import run


def test_what_is_stored_is_small_and_shown_by_one_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = run(tmp_path / "run", eval_dataset=token_rows(4, seed=1), logging_steps=1)
    trainer.save_model()
    loaded = Posterior.from_pretrained(tmp_path / "run")
    assert loaded.trace == trainer.posterior.trace
    risk, metrics = loaded.trace["risk"], loaded.config.metrics
    assert len(risk["sizes"]) == 9
    assert risk["risks"][-1] == pytest.approx(metrics["nll"], rel=1e-6)
    assert risk["risks"][0] == pytest.approx(metrics["member_nll"], rel=0.05)  # 16 orders of 9 members
    assert metrics["limit_nll"] == risk["limit"] < metrics["nll"]
    assert len(json.dumps(loaded.trace)) < 20_000
    tensors = torch.tensor(loaded.trace["kinetic_of_tensors"]["relative_to_law"])
    hottest = loaded.trace["logs"]["hottest_tensor"]
    assert hottest[11] == [None] * 3  # burn-in: 12 of 24 updates
    assert hottest[-1] == pytest.approx(tensors.amax(1).tolist(), rel=1e-4)
    monkeypatch.setenv("COLUMNS", "140")
    main(["diagnose", str(tmp_path / "run"), "--output", str(tmp_path / "figure.png")])
    shown = capsys.readouterr().out
    for words in ("sghmc, 3 chains", "kinetic temperature", "R-hat, single terms", "held-out NLL of a MAP estimate"):
        assert words in shown
    assert loaded.config.diagnostics["verdict"][:30] in shown
    assert (tmp_path / "figure.png").read_bytes()[:4] == b"\x89PNG"
    figure = plot(loaded.config.to_dict(), loaded.trace)
    assert figure is not None
    panels = [axis for axis in figure.axes if axis.get_title()]
    assert [re.split(": | of |, ", axis.get_title())[0] for axis in panels] == [
        "log-likelihood", "R-hat and ESS", "R-hat", "held-out NLL", "kinetic temperature", "kinetic temperature",
        "configurational temperature", "injected over minibatch noise", "distance from the start",
        "distance over the reach", "weights that the first noisy update left unchanged", "loss",
    ]  # fmt: skip
    figure.draw_without_rendering()  # places the parts
    for axis in panels:
        (reading,) = axis.texts
        assert reading.get_window_extent().y0 >= axis.bbox.y1  # above the data
        assert axis.get_legend() is None or axis.get_legend().get_window_extent().y1 <= axis.bbox.y0  # and below it


def test_a_posterior_without_a_run_has_a_table_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = run(tmp_path / "run", EnsembleConfig(num_chains=2), max_steps=2)
    untraced = dataclasses.replace(trainer.posterior, trace=None)
    untraced.save_pretrained(tmp_path / "run")
    assert Posterior.from_pretrained(tmp_path / "run").trace is None
    main(["diagnose", str(tmp_path / "run"), "--output", str(tmp_path / "figure.png")])
    assert "nothing to plot" in capsys.readouterr().out
    assert not (tmp_path / "figure.png").exists()


def test_a_run_without_diagnostics_says_how_to_record_them(tmp_path: Path, capsys: Any) -> None:
    posterior = run(tmp_path / "run", EnsembleConfig(num_chains=2), max_steps=2).posterior
    config = dataclasses.replace(posterior.config, diagnostics={"converged": None, "verdict": "not assessed"})
    dataclasses.replace(posterior, config=config, trace=None).save_pretrained(tmp_path / "own")
    main(["diagnose", str(tmp_path / "own"), "--output", str(tmp_path / "figure.png")])
    shown = capsys.readouterr().out
    assert "2 chains" in shown
    assert "docs/own_loop.md" in shown


def test_the_command_shows_foreign_text_as_it_is(tmp_path: Path, capsys: Any) -> None:
    trainer = run(tmp_path / "run")
    acting = "\x1b]0;owned\x07 \u202e [bold]$\\frac{$ \n"
    found, trace = trainer.diagnosis.summary(trainer.posterior.approximation)
    found |= {"verdict": acting, "values": acting}
    metrics = {f"{acting}_nll": 1.0, f"{acting}_member_nll": 1.0}
    config = dataclasses.replace(trainer.posterior.config, diagnostics=found, metrics=metrics)
    risk = {"sizes": [1, 2], "risks": [1.0, 0.9], "limit": 0.8, "slope": 0.1, "curvature": 0.0, "std_error": 0.1}
    trace |= {"risk": {**risk, "eval_set": acting}}
    Posterior(trainer.posterior.approximation, config, trainer.posterior.adapter_config, trace).save_pretrained(
        tmp_path / "saved"
    )
    main(["diagnose", str(tmp_path / "saved"), "--output", str(tmp_path / "figure.png")])
    shown = capsys.readouterr().out
    assert not set("\x1b\x07\u202e") & set(shown)
    assert "U+001B" in shown
    assert "[bold]" in shown
    assert (tmp_path / "figure.png").stat().st_size > 0
