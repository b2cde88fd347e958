from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from hf_bayes.cli.main import main
from hf_bayes.posteriors.posterior import Posterior
from tests.faults.edits import edit_json, sign
from tests.faults.posteriors import draws
from tests.runs import token_rows
from tests.training.diagnosed import run


def test_the_table_has_the_figures_of_every_eval_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = Dataset.from_list(token_rows(4, seed=1))
    trainer = run(tmp_path / "run", eval_dataset={"near": rows.select([0, 1]), "far_off": rows.select([2, 3])})
    trainer.save_model()
    monkeypatch.setenv("COLUMNS", "140")
    main(["diagnose", str(tmp_path / "run"), "--output", str(tmp_path / "figure.png")])
    shown, metrics = capsys.readouterr().out, Posterior.from_pretrained(tmp_path / "run").config.metrics
    for words, name, of in (
        ("held-out NLL", "nll", ("near", "far_off")),
        ("held-out NLL of a MAP estimate", "map_nll", ("near", "far_off")),
        ("held-out NLL, of infinitely many members", "limit_nll", ("far_off",)),
    ):
        for eval_set in of:
            (line,) = (line for line in shown.splitlines() if f"{words} ({eval_set}) " in line)
            assert f"{metrics[f'{eval_set}_{name}']:.4f}" in line


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda values: values.update(format_version=2), "format_version is 2"),
        (lambda values: values.pop("metrics"), "missing keys"),
        (lambda values: values.update(other=1), "unknown keys"),
        (lambda values: values["diagnostics"].update(num_chains="x"), "not of the types"),
        (lambda values: values["diagnostics"].update(distance=["a"], num_chains=1), "not of the types"),
    ],
)
def test_a_broken_config_ends_in_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Any, words: str
) -> None:
    draws(2).save_pretrained(tmp_path)
    edit_json(tmp_path / "posterior_config.json", change)
    sign(tmp_path)
    assert main(["diagnose", str(tmp_path), "--output", str(tmp_path / "figure.png")]) == 2
    assert words in " ".join(capsys.readouterr().err.split())
