from __future__ import annotations

from collections import Counter

import pytest
from datasets import Dataset
from transformers import DataCollatorForSeq2Seq, PreTrainedTokenizerFast

from hf_bayes.cli.token_windows import Window, token_windows, window_length, window_spans
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


def test_joined_texts_may_end_without_a_separator(tokenizer: PreTrainedTokenizerFast) -> None:
    closed = token_windows(texts(*TEXTS), tokenizer, length=12, join=True)
    without = token_windows(texts(*TEXTS), tokenizer, length=12, join=True, close=False)
    assert closed[-1]["input_ids"][-1] == tokenizer.eos_token_id
    assert without[-1]["input_ids"][1:] == closed[-1]["input_ids"][:-1]
    assert labelled(closed) == sorted([*labelled(without), tokenizer.eos_token_id])


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


@pytest.mark.parametrize(
    ("given", "context", "expected"), [(None, 512, 256), (None, 48, 48), (None, None, 256), (300, 512, 300)]
)
def test_a_window_is_no_longer_than_the_context(given: int | None, context: int | None, expected: int) -> None:
    assert window_length(given, context, default=256) == expected
