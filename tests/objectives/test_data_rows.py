from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
    default_data_collator,
)

from hf_bayes.objectives.data_rows import in_words, is_stream, require_dataset
from tests.tiny_models import tiny_tokenizer


class Counted(IterableDataset[int]):
    """A stream that says how many rows it has."""

    def __iter__(self) -> Iterator[int]:
        yield from range(3)

    def __len__(self) -> int:
        return 3


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ({"train": [1], "test": [2]}, "data is a mapping with the keys 'train', 'test', .* give one of its splits"),
        ("a text", "data must be a list or data set of rows, .* got 'a text'"),
        (3, "data must be a list or data set of rows, .* got 3"),
        ([], "data has 0 rows; N is needed to scale the likelihood: give it data"),
    ],
)
def test_what_holds_no_rows_is_refused(dataset: Any, message: str) -> None:
    require_dataset([{"input_ids": [1]}], "data")
    with pytest.raises(ValueError, match=message):
        require_dataset(dataset, "data")


def test_a_row_that_no_collator_reads_is_named() -> None:
    collate = in_words(lambda rows: [row["x"] for row in rows], "eval_dataset")
    assert collate([{"x": 1}, {"x": 2}]) == [1, 2]
    with pytest.raises(ValueError, match=r"eval_dataset has a row that the data collator cannot read: None \(NoneType"):
        collate([{"x": 1}, None])
    with pytest.raises(KeyError, match="x"):  # an error of the collator on rows that are mappings stays its own
        collate([{"y": 1}])


@pytest.mark.parametrize("of", [list, torch.tensor], ids=["lists", "tensors"])
def test_rows_of_unequal_length_are_told_to_be_padded(of: Any) -> None:
    collate = in_words(default_data_collator, "data")
    rows = [{"input_ids": of([3] * length), "labels": 0} for length in (8, 7, 8)]
    assert collate(rows[::2])["input_ids"].shape == (2, 8)
    words = r"data has rows of unequal length \(shapes \[7\] and \[8\] in 'input_ids'\), .*DataCollatorWithPadding.*"
    with pytest.raises(ValueError, match=words + "collate= .* data_collator="):
        collate(rows)


@pytest.mark.parametrize("text", ["words", ["two", "words"]], ids=["text", "words"])
def test_text_that_no_collator_pads_is_named_first(text: Any) -> None:
    rows = [{"text": text, "input_ids": [3] * length, "labels": 0} for length in (8, 7)]
    words = r"data has text in 'text', of which .*: leave 'text' out, by remove_columns\(\['text'\]\) .*remove_unused"
    with pytest.raises(ValueError, match=words):
        in_words(DataCollatorWithPadding(tiny_tokenizer()), "data")(rows)
    with pytest.raises(ValueError, match=r"unequal length .* in 'input_ids'"):  # a collator that skips text
        in_words(default_data_collator, "data")([{**row, "text": "words"} for row in rows])


def test_classes_by_name_are_to_be_encoded() -> None:
    rows = [{"text": "words", "label": name, "input_ids": [3] * length} for name, length in (("no", 8), ("yes", 7))]
    words = (
        r"text in 'text', 'label', .*: encode the classes in 'label' as integers, by "
        r"data.class_encode_column\(\"label\"\) .*; leave 'text' out, by remove_columns\(\['text'\]\)"
    )
    with pytest.raises(ValueError, match=words):
        in_words(DataCollatorWithPadding(tiny_tokenizer()), "data")(rows)


def test_a_tokenizer_without_a_pad_token_is_to_get_one() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = None
    rows = [{"input_ids": [3] * length} for length in (8, 7)]
    with pytest.raises(ValueError, match=r"tokenizer.pad_token = tokenizer.eos_token$") as caught:
        in_words(DataCollatorForLanguageModeling(tokenizer, mlm=False), "data")(rows)
    assert "collator that pads" not in str(caught.value)


def test_rows_without_labels_name_the_collator_of_texts() -> None:
    rows = [{"input_ids": [3] * length} for length in (8, 7)]
    with pytest.raises(ValueError, match=r"LanguageModeling\(tokenizer, mlm=False\) for a language model"):
        in_words(default_data_collator, "data")(rows)
    with pytest.raises(ValueError, match=r"such as transformers.DataCollatorWithPadding\(tokenizer\), as collate="):
        in_words(default_data_collator, "data")([{**row, "label": 0} for row in rows])


def test_labels_of_unequal_length_need_a_collator_of_labels() -> None:
    rows = [{"input_ids": [3] * length, "labels": [1] * length} for length in (8, 7)]
    words = (
        r"shapes \[7\] and \[8\] in 'labels'.* pads 'labels', such as transformers.DataCollatorForTokenClassification"
    )
    for collate in (DataCollatorWithPadding(tiny_tokenizer()), default_data_collator):
        with pytest.raises(ValueError, match=words):
            in_words(collate, "data")(rows)
    collate = in_words(DataCollatorForTokenClassification(tiny_tokenizer()), "data")
    assert collate(rows)["labels"].tolist() == [[1] * 8, [1] * 7 + [-100]]


def test_errors_of_a_collator_on_equal_rows_stay_its_own() -> None:
    def failing(rows: Any) -> Any:
        raise ValueError("of its own")

    with pytest.raises(ValueError, match=r"^of its own$"):
        in_words(failing, "data")([{"x": [1]}, {"x": [2], "y": torch.tensor(1.0), "text": "words"}])


def test_a_stream_has_no_length_or_an_order_of_its_own() -> None:
    assert is_stream(iter([1]))
    assert is_stream(Counted())
    assert not is_stream([1])
