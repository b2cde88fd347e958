from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from hf_bayes import Posterior, pipeline
from hf_bayes.posteriors.sidecars import Sidecars
from tests.cli.commands.running import run
from tests.tiny_models import TEXTS, tiny_tokenizer


def test_scores_are_those_of_the_pipeline(posterior: str, capsys: pytest.CaptureFixture[str]) -> None:
    run("score", posterior, "--text", *TEXTS[:2], "--json", "--batch_size", "1")
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    wanted = pipeline(model=posterior).score(TEXTS[:2])
    assert [record["text"] for record in found] == list(TEXTS[:2])
    for mine, other in zip(found, wanted, strict=True):
        assert [token["epistemic"] for token in mine["tokens"]] == pytest.approx(
            [token["epistemic"] for token in other["tokens"]], abs=1e-6
        )


def test_a_temperature_can_be_left_out(posterior: str, capsys: pytest.CaptureFixture[str]) -> None:
    run("score", posterior, "--text", TEXTS[0], "--members", "1", "--no_calibrated", "--json")
    (record,) = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert record["num_members"] == 1
    assert record["uncertainty"]["epistemic"] == pytest.approx(0, abs=1e-6)


def test_texts_are_cut_to_a_number_of_tokens(posterior: str, capsys: pytest.CaptureFixture[str]) -> None:
    run("score", posterior, "--text", *TEXTS[:2], "--json", "--max_length", "6")
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [len(record["tokens"]) for record in found] == [5, 5]  # the first token is not predicted
    with pytest.raises(ValueError, match=r"--max_length must be at least 1, got 0"):
        run("score", posterior, "--text", TEXTS[0], "--max_length", "0")


def test_the_refusal_of_a_long_text_names_the_flag(posterior: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.warns(UserWarning, match=r"the text has .*, in a command with --max_length 128"):
        run("score", posterior, "--text", TEXTS[0] * 20, "--json")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="the text has")
        run("score", posterior, "--text", TEXTS[0] * 20, "--json", "--max_length", "128")


def test_texts_are_scored_together_without_a_padding_token(
    posterior: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = None
    saved = replace(Posterior.from_pretrained(posterior), sidecars=Sidecars.of(tokenizer))
    saved.save_pretrained(tmp_path / "out")
    run("score", str(tmp_path / "out"), "--text", *TEXTS[:2], "--json")
    together = [json.loads(line)["uncertainty"] for line in capsys.readouterr().out.splitlines()]
    run("score", posterior, "--text", *TEXTS[:2], "--json", "--batch_size", "1")
    alone = [json.loads(line)["uncertainty"] for line in capsys.readouterr().out.splitlines()]
    assert [each["epistemic"] for each in together] == pytest.approx([each["epistemic"] for each in alone], abs=1e-5)


def test_a_short_file_of_a_glob_is_named(posterior: str, tmp_path: Path) -> None:
    for name, text in {"g1.txt": TEXTS[0], "g2.txt": "a"}.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=rf"^{tmp_path}/g2\.txt: a text needs two tokens .* got 1 in 'a': drop it$"):
        run("score", posterior, "--file", str(tmp_path / "g*.txt"))


def test_a_text_without_two_tokens_is_named(posterior: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in [TEXTS[0], "", TEXTS[1]]))
    with pytest.raises(ValueError, match=r"^line 2 of .*rows\.jsonl: a text needs two tokens .* got 0 in '': drop it$"):
        run("score", posterior, "--file", str(file), "--batch_size", "1")
    with pytest.raises(ValueError, match=r"^text 2 of 2: .* got 1 in 'a': drop it$"):
        run("score", posterior, "--text", TEXTS[0], "a")
    with pytest.raises(ValueError, match=r"^text 1 of 1: .* got 1 in .*: drop it, or raise --max_length$"):
        run("score", posterior, "--text", TEXTS[0], "--max_length", "1")
