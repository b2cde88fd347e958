from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hf_bayes.cli import harness
from tests.cli.commands.conftest import posterior  # noqa: F401 - a fixture
from tests.pipelines.harness_task import write_tasks


def test_without_lm_eval_a_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(SystemExit, match="pip install lm_eval"):
        harness.main()


@pytest.mark.slow
def test_the_command_prints_the_metrics(
    posterior: str,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    lm_eval = pytest.importorskip("lm_eval", reason="lm_eval is no dependency: make test-doors")
    monkeypatch.setattr(lm_eval, "simple_evaluate", lm_eval.simple_evaluate, raising=False)  # and restored
    place = ["--model", "hf_bayes", "--model_args", f"pretrained={posterior}", "--device", "cpu"]
    task = ["--tasks", "tiny_choice", "--include_path", write_tasks(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["lm_eval", *place, *task])
    harness.main()
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert {"acc", "ece", "epistemic"} <= {row[5].strip() if row[5].strip() else row[4].strip() for row in rows[2:]}
