"""The scripts are examples of the functions behind the commands, whose tests are in tests/cli/commands."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

from hf_bayes import Posterior
from tests.cli.commands.running import config_file
from tests.tiny_models import TEXTS, tiny_bert, tiny_llama, tiny_tokenizer


def run(monkeypatch: pytest.MonkeyPatch, script: str, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", [f"{script}.py", *arguments])
    importlib.import_module(f"scripts.{script}").main()


def test_run_clm_makes_a_posterior(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_llama().save_pretrained(tmp_path / "llama")
    tiny_tokenizer().save_pretrained(tmp_path / "llama")
    (tmp_path / "book.txt").write_text("\n".join(TEXTS * 20))
    fields = {"model_name_or_path": str(tmp_path / "llama"), "dataset": str(tmp_path / "book.txt"), "window": 32}
    run(monkeypatch, "run_clm", config_file(tmp_path / "run.yaml", **fields, output_dir=str(tmp_path / "out")))
    assert Posterior.from_pretrained(tmp_path / "out").config.task == "causal_lm"


def test_run_classification_makes_a_posterior(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_bert(num_labels=2).save_pretrained(tmp_path / "bert")
    tiny_tokenizer().save_pretrained(tmp_path / "bert")
    rows = [{"text": f"{TEXTS[i % 4]} {i}", "label": i % 2} for i in range(20)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    fields = {"model_name_or_path": str(tmp_path / "bert"), "dataset": str(tmp_path / "rows.jsonl")}
    file = config_file(tmp_path / "run.yaml", **fields, output_dir=str(tmp_path / "out"))
    run(monkeypatch, "run_classification", file)
    assert Posterior.from_pretrained(tmp_path / "out").config.task == "sequence_classification"


@pytest.mark.parametrize(
    ("script", "arguments", "words"),
    [
        ("run_continual", ["--model_name_or_path", "x", "--episodes", "one.txt", "--push_to_hub"], "push_to_hub is"),
        ("evaluate_uncertainty", ["--posterior", "out", "--test", "t.txt", "--ood", "t.txt"], "--ood takes name=file"),
    ],
)
def test_other_scripts_reach_their_functions(
    monkeypatch: pytest.MonkeyPatch, script: str, arguments: list[str], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        run(monkeypatch, script, *arguments)
