from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import default_data_collator

from hf_bayes.cli.evaluation.case import Target, evaluate
from hf_bayes.cli.evaluation.windows import WINDOW_CASE, WindowArguments, windows_of
from hf_bayes.metrics.figures import Array, terms
from hf_bayes.models.attaching import attach
from hf_bayes.uncertainty.likelihoods import IGNORE
from tests.cli.evaluated import found_by, members_of
from tests.tiny_models import EOS, TEXTS, tiny_llama, tiny_tokenizer, with_lora


def test_no_windows_are_refused_before_anything_is_loaded() -> None:
    with pytest.raises(ValueError, match="--max_windows must be at least 1, got 0"):
        WindowArguments(max_windows=0)


def test_windows_are_spread_over_the_text(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("\n".join(TEXTS * 4))
    every = windows_of(str(tmp_path / "text.txt"), tiny_tokenizer(), length=16, limit=1000)
    some = windows_of(str(tmp_path / "text.txt"), tiny_tokenizer(), length=16, limit=2)
    assert some["input_ids"] == [every["input_ids"][0], every["input_ids"][len(every) // 2]]
    assert list(some["labels"]) == [[IGNORE, *row[1:]] for row in some["input_ids"]]
    with pytest.raises(ValueError, match=r"text.txt is shorter than one window of 5000 tokens: give more text"):
        windows_of(str(tmp_path / "text.txt"), tiny_tokenizer(), length=5000, limit=2)


@pytest.mark.parametrize("extra", [0, 1, 9])
def test_each_token_of_a_text_is_a_label_at_most_once(extra: int, tmp_path: Path) -> None:
    """Only the first token of the text and of each row that overlaps no other is no label."""
    length, tokenizer = 16, tiny_tokenizer()
    ids = tokenizer("\n".join(TEXTS))["input_ids"][: 2 * length + extra]
    (tmp_path / "text.txt").write_text(tokenizer.decode(ids))
    rows = windows_of(str(tmp_path / "text.txt"), tokenizer, length=length, limit=1000)
    starts = [0, length, len(ids) - length][: len(rows)]
    assert list(rows["input_ids"]) == [ids[start : start + length] for start in starts]
    found = [token for row in rows["labels"] for token in row if token != IGNORE]
    assert found == [*ids[1:length], *ids[length + 1 :]]


def test_the_end_token_stands_between_the_rows_only(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    length = sum(len(tiny_tokenizer()(text)["input_ids"]) + 1 for text in TEXTS) - 1
    (row,) = windows_of(str(tmp_path / "rows.jsonl"), tiny_tokenizer(), length=length, limit=9)["input_ids"]
    assert row.count(EOS) == len(TEXTS) - 1
    assert row[-1] != EOS


def test_one_text_needs_no_token_at_its_end(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(" ".join(TEXTS))
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    usual, without = tiny_tokenizer(), tiny_tokenizer()
    without.eos_token = None
    expected, found = (windows_of(str(tmp_path / "text.txt"), each, length=16, limit=9) for each in (usual, without))
    assert list(found["input_ids"]) == list(expected["input_ids"])
    with pytest.raises(
        ValueError, match=r"rows\.jsonl has 4 texts, .* the tokenizer has none: give one text in a .txt"
    ):
        windows_of(str(tmp_path / "rows.jsonl"), without, length=16, limit=9)


def test_the_texts_of_rows_are_joined(tmp_path: Path) -> None:
    """A table is no text: its other columns and its commas are not scored."""
    (tmp_path / "rows.csv").write_text("body,label\n" + "\n".join(f"{text},1" for text in TEXTS[:1] * 9))
    files, tokenizer = {"test": str(tmp_path / "rows.csv")}, tiny_tokenizer()
    target, args = Target({}, None, text_column="body"), WindowArguments(length=8)
    found = [token for row in WINDOW_CASE.read(files, tokenizer, target, args)["test"]["input_ids"] for token in row]
    alone = tokenizer(TEXTS[0])["input_ids"]
    assert found[: len(alone) + 1] == [*alone, EOS]
    with pytest.raises(ValueError, match=r"rows.csv has no column 'text', only body, label: name one of them"):
        WINDOW_CASE.read(files, tokenizer, Target({}, None), args)


@pytest.mark.parametrize(("given", "context", "expected"), [(None, 48, 48), (None, None, 128), (16, 48, 16)])
def test_windows_fit_the_context(given: int | None, context: int | None, expected: int, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("\n".join(TEXTS * 8))
    files, tokenizer = {"test": str(tmp_path / "text.txt")}, tiny_tokenizer()
    sets = WINDOW_CASE.read(files, tokenizer, Target({}, context), WindowArguments(length=given))
    assert {len(row) for row in sets["test"]["input_ids"]} == {expected}


def test_tokens_keep_their_window_in_batches_of_any_size() -> None:
    generator = torch.Generator().manual_seed(0)
    model = attach(with_lora(tiny_llama()), num_members=3)
    model.theta.data += 0.3 * torch.randn(model.theta.shape, generator=generator)
    tokens = torch.randint(3, 300, (5, 8), generator=generator).tolist()
    windows = Dataset.from_dict({"input_ids": tokens, "labels": tokens})

    def evaluated(rows: Dataset, batch_size: int) -> dict[str, Array]:
        return evaluate(model, {"test": rows}, WINDOW_CASE, default_data_collator, batch_size=batch_size)["test"]

    found, alone = evaluated(windows, 2), evaluated(windows.select([3]), 1)
    assert found["nll"].shape == (5, 7)
    assert found["nll"][3] == pytest.approx(alone["nll"][0], rel=1e-4)
    assert {"total", "epistemic", "confidence", "correct", "brier", "member_nll"} <= set(found)


def test_labels_of_an_earlier_row_are_not_scored(tmp_path: Path) -> None:
    model, tokenizer, length = members_of(tiny_llama()), tiny_tokenizer(), 16
    ids = tokenizer("\n".join(TEXTS))["input_ids"][: length + 5]
    (tmp_path / "text.txt").write_text(tokenizer.decode(ids))
    files = {name: str(tmp_path / "text.txt") for name in ("test", "other")}
    found = found_by(WINDOW_CASE, model, files, [], length=length)
    for name in ("confidence", "total", "epistemic"):
        assert found["other"][name] == pytest.approx(found["test"][name], nan_ok=True)
    assert [len(terms(row)) for row in found["test"]["nll"]] == [length - 1, 5]
    whole = evaluate(
        model, {"test": Dataset.from_dict({"input_ids": [ids[5:]], "labels": [ids[5:]]})}, WINDOW_CASE,
        default_data_collator, batch_size=1,
    )  # fmt: skip
    assert terms(found["test"]["nll"][1]) == pytest.approx(whole["test"]["nll"][0, -5:], rel=1e-4)
