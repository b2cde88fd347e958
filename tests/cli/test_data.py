from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from transformers import DataCollatorForSeq2Seq, PreTrainedTokenizerFast

from hf_bayes.cli.data import load_episode, load_splits
from hf_bayes.cli.token_windows import Window, token_windows, window_spans
from hf_bayes.uncertainty.likelihoods import IGNORE
from tests.tiny_models import TEXTS

LENGTHS = [(8, 0), (8, 3), (8, 7), (2, 1), (64, 16)]


def counted(windows: list[Window]) -> Counter[int]:
    return Counter(token for window in windows for token in range(window.loss_start, window.end))


@pytest.mark.parametrize(("length", "overlap"), LENGTHS)
@pytest.mark.parametrize("num_tokens", [1, 2, 7, 8, 9, 15, 16, 17, 100])
def test_every_token_counts_once_when_loss_and_step_are_equal(num_tokens: int, length: int, overlap: int) -> None:
    windows = window_spans(num_tokens, length=length, overlap=overlap)
    assert counted(windows) == Counter(range(num_tokens))


@pytest.mark.parametrize("num_tokens", [299, 300, 301, 500, 501, 2345])
def test_windows_give_each_counted_token_250_tokens_of_context(num_tokens: int) -> None:
    windows = window_spans(num_tokens, length=300, overlap=100, loss_tokens=50, score_start=False)
    whole = [window for window in windows if window.end - window.start == 300]
    assert len(whole) == len(windows) or num_tokens < 300
    assert all(window.end - window.loss_start <= 50 for window in windows)
    assert all(window.loss_start - window.start >= 250 for window in whole)
    assert max(counted(windows).values()) == 1
    starts = [window.start for window in windows]
    assert starts[:-1] == [200 * i for i in range(len(starts) - 1)]


@pytest.mark.parametrize(("length", "overlap"), LENGTHS)
def test_the_last_window_is_as_long_as_the_others(length: int, overlap: int) -> None:
    windows = window_spans(101, length=length, overlap=overlap)
    assert {window.end - window.start for window in windows} == {length}


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ({"length": 1}, "length >= 2"),
        ({"length": 8, "overlap": 8}, "overlap < length"),
        ({"length": 8, "overlap": -1}, "0 <= overlap"),
        ({"length": 8, "overlap": 4, "loss_tokens": 5}, "more than once"),
        ({"length": 8, "loss_tokens": 0}, "between 1 and"),
    ],
)
def test_lengths_that_do_not_fit_are_refused(lengths: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        window_spans(10, **lengths)


def texts(*rows: str) -> Dataset:
    return Dataset.from_dict({"text": list(rows)})


def labelled(windows: Dataset) -> list[int]:
    return sorted(label for row in windows["labels"] for label in row if label != IGNORE)


def test_labels_are_the_tokens_and_the_mask_is_full(tokenizer: PreTrainedTokenizerFast) -> None:
    for row in token_windows(texts(*TEXTS), tokenizer, length=12, overlap=5, loss_tokens=4):
        assert row["attention_mask"] == [1] * len(row["input_ids"])
        pairs = zip(row["input_ids"], row["labels"], strict=True)
        assert all(label in (IGNORE, token) for token, label in pairs)
        assert row["labels"][0] == IGNORE


def test_every_token_of_every_text_but_its_first_is_a_label_once(tokenizer: PreTrainedTokenizerFast) -> None:
    windows = token_windows(texts(*TEXTS), tokenizer, length=12, overlap=5)
    assert labelled(windows) == sorted(token for text in TEXTS for token in tokenizer(text)["input_ids"][1:])


def test_joined_texts_are_one_text_with_separators(tokenizer: PreTrainedTokenizerFast) -> None:
    windows = token_windows(texts(*TEXTS), tokenizer, length=12, overlap=5, join=True)
    stream = [token for text in TEXTS for token in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]]
    assert labelled(windows) == sorted(stream[1:])
    assert {len(row) for row in windows["input_ids"]} == {12}


def test_joining_without_an_end_of_sequence_token_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    class NoEnd:
        eos_token_id = None

    with pytest.raises(ValueError, match="end-of-sequence token"):
        token_windows(texts(*TEXTS), NoEnd(), length=12, join=True)


def test_texts_without_a_token_to_predict_are_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ValueError, match="are they empty"):
        token_windows(texts("", "a"), tokenizer, length=12)


def test_windows_collate_with_padding_out_of_the_loss(tokenizer: PreTrainedTokenizerFast) -> None:
    windows = token_windows(texts("A chain.", TEXTS[0]), tokenizer, length=16)
    batch = DataCollatorForSeq2Seq(tokenizer, label_pad_token_id=IGNORE)(list(windows))
    assert (batch["labels"][batch["attention_mask"] == 0] == IGNORE).all()
    assert (batch["attention_mask"] == 0).any()


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    match path.suffix:
        case ".jsonl":
            path.write_text("\n".join(map(json.dumps, rows)))
        case ".csv":
            path.write_text("\n".join([",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]))
        case ".txt":
            path.write_text("\n".join(row["text"] for row in rows))
    return str(path)


ROWS = [{"text": f"text {i}", "label": "even" if i % 2 == 0 else "odd"} for i in range(20)]


@pytest.mark.parametrize("suffix", [".jsonl", ".csv"])
def test_a_missing_validation_split_is_a_fixed_share_of_the_rows(tmp_path: Path, suffix: str) -> None:
    file = write(tmp_path / f"rows{suffix}", ROWS)
    splits = load_splits(file, validation_fraction=0.2)
    assert (len(splits["train"]), len(splits["validation"])) == (16, 4)
    assert {*splits["train"]["text"], *splits["validation"]["text"]} == {row["text"] for row in ROWS}
    assert load_splits(file, validation_fraction=0.2)["validation"]["text"] == splits["validation"]["text"]
    assert load_splits(file, validation_fraction=0.2, seed=1)["validation"]["text"] != splits["validation"]["text"]


def test_one_text_is_cut_at_a_line_end_and_nothing_is_lost(tmp_path: Path) -> None:
    content = "\n".join(f"line {i} of the book" for i in range(100))
    (tmp_path / "book.txt").write_text(content)
    splits = load_splits(str(tmp_path / "book.txt"), validation_fraction=0.15)
    head, tail = splits["train"][0]["text"], splits["validation"][0]["text"]
    assert head + tail == content
    assert tail.startswith("line")
    assert len(tail) / len(content) == pytest.approx(0.15, abs=0.02)


def test_files_and_globs_are_splits_of_their_own(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", ROWS[:5])
    write(tmp_path / "b.jsonl", ROWS[5:12])
    held_out = write(tmp_path / "held-out.jsonl", ROWS[12:])
    splits = load_splits(str(tmp_path / "?.jsonl"), validation_file=held_out)
    assert (len(splits["train"]), len(splits["validation"])) == (12, 8)


def test_text_files_are_one_text_each(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        write(tmp_path / f"{name}.txt", ROWS)
    splits = load_splits(str(tmp_path / "*.txt"), validation_fraction=0.3)
    assert (len(splits["train"]), len(splits["validation"])) == (2, 1)


def test_a_fraction_of_0_holds_no_row_out(tmp_path: Path) -> None:
    rows = write(tmp_path / "rows.jsonl", ROWS)
    splits = load_splits(rows, validation_fraction=0.0)
    assert list(splits) == ["train"]
    assert splits["train"].to_list() == ROWS
    # an existing validation split is not replaced by the fraction
    splits = load_splits(rows, validation_file=rows, validation_fraction=0.0)
    assert len(splits["validation"]) == len(ROWS)
    assert list(load_splits(rows, validation_fraction=0)) == ["train"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("gap.csv", "text,label\nhello there,2\n,4\nmore of it,5\n", "row 1 of 'text' holds nothing"),
        ("gap.jsonl", '{"text": "a b"}\n{"text": null}\n', "row 1 of 'text' holds nothing"),
        ("numbers.csv", "text,label\n1,2\n3,4\n", "'text' holds int64, expected text"),
        ("lists.jsonl", '{"text": ["a", "b"]}\n{"text": ["c"]}\n', "'text' holds List, expected text"),
    ],
)
def test_a_row_that_is_no_text_is_refused(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    for load in (load_splits, load_episode):
        with pytest.raises(ValueError, match=rf"{name}': .*{message}"):
            load(str(tmp_path / name))


def test_bad_data_is_refused(tmp_path: Path) -> None:
    rows = write(tmp_path / "rows.jsonl", ROWS)
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "letter.txt").write_text("w")
    (tmp_path / "notes.md").write_text("text")
    with pytest.raises(FileNotFoundError, match=r"no file matches .*nowhere\.csv"):
        load_splits(str(tmp_path / "nowhere.csv"))
    with pytest.raises(ValueError, match=r"empty\.jsonl is empty"):
        load_splits(str(tmp_path / "empty.jsonl"))
    with pytest.raises(ValueError, match="no column 'body', only text, label"):
        load_splits(rows, text_column="body")
    for fraction in (1.0, -0.1, float("nan")):
        with pytest.raises(ValueError, match=rf"at least 0, which holds no row out, and below 1, got {fraction}"):
            load_splits(rows, validation_fraction=fraction)
    with pytest.raises(ValueError, match="too short to hold out a part"):
        load_splits(str(tmp_path / "letter.txt"))
    with pytest.raises(
        ValueError, match=r"letter\.txt' is too short to hold out 0.15 of it as its end: give more text"
    ):
        load_episode(str(tmp_path / "letter.txt"))
    with pytest.raises(ValueError, match="all be of one format"):
        load_splits(rows, validation_file=str(tmp_path / "notes.md"))
    with pytest.raises(ValueError, match="goes with a local training file"):
        load_splits("someone/dataset", validation_file=rows)
