from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from hf_bayes.cli.evaluation.texts import TextArguments, collate_texts, text_sets
from tests.cli.evaluated import NUM_ROWS, write_rows
from tests.tiny_models import tiny_tokenizer


def sets_of(files: dict[str, str], text_column: str = "text") -> dict[str, Dataset]:
    reading: dict[str, Any] = {"labels_of": lambda rows, file: rows["label"], "placeholder": -1}
    return text_sets(files, tiny_tokenizer(), TextArguments(), text_column=text_column, **reading)


def test_only_test_rows_have_labels_of_their_own(tmp_path: Path) -> None:
    sets = sets_of(write_rows(tmp_path, list(range(NUM_ROWS))))
    assert sets["test"]["labels"] == list(range(7))
    assert sets["other"]["labels"] == [-1] * 5


def test_every_batch_is_padded_to_the_longest_row_of_all_sets(tmp_path: Path) -> None:
    sets = sets_of(write_rows(tmp_path, [0] * NUM_ROWS))
    longest = max(len(ids) for rows in sets.values() for ids in rows["input_ids"])
    collate = collate_texts(tiny_tokenizer(), sets, TextArguments())
    assert collate([sets["other"][0]])["input_ids"].shape == (1, longest)


def test_missing_columns_are_refused(tmp_path: Path) -> None:
    files = write_rows(tmp_path, [0] * NUM_ROWS)
    with pytest.raises(ValueError, match=r"test.jsonl has no column 'title', only text, label: name one of them"):
        sets_of(files, text_column="title")


@pytest.mark.parametrize("given", [{"label_column": "text"}, {"pair_column": "text"}, {"pair_column": "label"}])
def test_a_column_has_one_use(tmp_path: Path, given: dict[str, str]) -> None:
    files = write_rows(tmp_path, ["a"] * NUM_ROWS)
    reading: dict[str, Any] = {"labels_of": lambda rows, file: [0] * len(rows), "placeholder": 0}
    with pytest.raises(ValueError, match="the columns of the text, the second text and the label must differ, got "):
        text_sets(files, tiny_tokenizer(), TextArguments(**given), text_column="text", **reading)
