from __future__ import annotations

import json
from pathlib import Path

import pytest

from hf_bayes import Posterior
from tests.cli.commands.running import config_file, run
from tests.tiny_models import tiny_gpt2, tiny_tokenizer


def test_train_turns_a_text_file_into_a_posterior(tmp_path: Path, llama: str, book: str) -> None:
    out = tmp_path / "posterior"
    fields = {"model_name_or_path": llama, "dataset": book, "window": 32, "overlap": 16, "output_dir": str(out)}
    run("train", config_file(tmp_path / "run.yaml", **fields))
    posterior = Posterior.from_pretrained(out)
    assert posterior.config.num_members == 2
    assert posterior.config.task == "causal_lm"
    metrics = json.loads((out / "eval_results.json").read_text())
    assert posterior.config.metrics["nll"] == pytest.approx(metrics["eval_nll"])
    assert (out / "tokenizer.json").exists()


def test_train_counts_the_tokens_of_the_papers_windows(tmp_path: Path, llama: str, book: str) -> None:
    out = tmp_path / "posterior"
    fields = {"model_name_or_path": llama, "dataset": book, "window": 30, "overlap": 10, "output_dir": str(out)}
    file = config_file(tmp_path / "run.yaml", **fields)
    flags = ["--loss_tokens", "5", "--score_start", "false", "--validation_fraction", "0.5"]
    run("train", "--config", file, *flags)
    text = Path(book).read_text()
    half = text[: text.rfind("\n", 0, len(text) // 2) + 1]
    tokens = len(tiny_tokenizer()(half)["input_ids"])
    # one window each 20 tokens, 5 tokens of each; the last, shorter step may count fewer
    windows = 1 + -(-(tokens - 30) // 20)
    assert 5 * windows - 5 < Posterior.from_pretrained(out).config.num_data <= 5 * windows


def test_train_without_held_out_rows(tmp_path: Path, llama: str, book: str) -> None:
    out = tmp_path / "posterior"
    fields = {"model_name_or_path": llama, "dataset": book, "window": 32, "output_dir": str(out)}
    run("train", config_file(tmp_path / "run.yaml", **fields, validation_fraction=0))
    posterior = Posterior.from_pretrained(out)
    assert posterior.config.metrics == {}
    assert posterior.config.num_data == len(tiny_tokenizer()(Path(book).read_text())["input_ids"]) - 1
    assert not (out / "eval_results.json").exists()


def test_train_samples_a_block_without_lora(tmp_path: Path, book: str) -> None:
    tiny_gpt2().save_pretrained(tmp_path / "gpt2")
    tiny_tokenizer().save_pretrained(tmp_path / "gpt2")
    out = tmp_path / "posterior"
    fields = {
        **{"model_name_or_path": str(tmp_path / "gpt2"), "dataset": book, "window": 32, "output_dir": str(out)},
        **{"lora_rank": 0, "subspace": "last_block", "method": "map", "method_args": {"num_chains": 1}},
    }
    run("train", config_file(tmp_path / "run.yaml", **fields))
    names = [name for name, _ in Posterior.from_pretrained(out).config.parameters]
    assert names
    assert all(".h.1." in name for name in names)


def test_bad_method_fields_stop_train_before_loading(tmp_path: Path) -> None:
    fields = {"model_name_or_path": "nowhere", "dataset": "nowhere.txt", "output_dir": str(tmp_path / "out")}
    file = config_file(tmp_path / "run.yaml", **fields, method_args={"num_chains": -1})
    with pytest.raises(ValueError, match="num_chains must be an integer"):
        run("train", file)
    assert not (tmp_path / "out").exists()
