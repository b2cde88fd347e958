from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hf_bayes import Posterior
from hf_bayes.cli.commands import tune as module
from hf_bayes.methods.averaging.map import MAPConfig
from hf_bayes.training.tuning.candidates import Candidate
from tests.cli.commands.running import config_file, run
from tests.tiny_models import TEXTS

CANDIDATES = (Candidate("plain fine-tuning", MAPConfig(), 1e-2), Candidate("slow", MAPConfig(), 1e-5))


@pytest.fixture
def rows(tmp_path: Path) -> str:
    lines = [{"text": TEXTS[i % 4], "label": i % 2} for i in range(240)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return str(tmp_path / "rows.jsonl")


@pytest.mark.parametrize("task", ["lm", "classify"])
def test_the_best_candidate_of_a_task_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rows: str, task: str,
    request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    monkeypatch.setattr(module, "compare", partial(module.compare, candidates=CANDIDATES))
    model = request.getfixturevalue("llama" if task == "lm" else "bert")
    fields: dict[str, Any] = {
        "task": task, "model_name_or_path": model, "dataset": rows, "validation_fraction": 0.84, "budget": 400,
        "output_dir": str(tmp_path / "out"), "method": None, "method_args": None, "learning_rate": None,
        "max_steps": None, "per_device_eval_batch_size": 64,
    }  # fmt: skip
    file = config_file(tmp_path / "run.yaml", **fields, **({"window": 32} if task == "lm" else {}))
    run("tune", file)
    shown = capsys.readouterr().out
    assert "is chosen: held-out NLL" in shown
    expected = "causal_lm" if task == "lm" else "sequence_classification"
    assert Posterior.from_pretrained(tmp_path / "out").config.task == expected
    run("tune", file)  # finished runs are kept
    assert capsys.readouterr().out == shown


@pytest.mark.parametrize(
    ("task", "flags", "words"),
    [
        ("lm", ["--label_column", "intent"], "--label_column: not for --task lm, leave it out"),
        ("classify", ["--window", "64"], "--window: not for --task classify, leave it out"),
        ("tagger", [], "invalid choice: 'tagger'"),
    ],
)
def test_arguments_of_another_task_are_refused(task: str, flags: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        run("tune", "--task", task, "--model_name_or_path", "x", "--dataset", "x.txt", *flags)
