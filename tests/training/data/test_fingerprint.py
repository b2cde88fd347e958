from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset
from transformers import DataCollatorForLanguageModeling, default_data_collator

from hf_bayes.training.data.fingerprint import SAMPLED_ROWS, describe_rows, describe_stream
from tests import runs
from tests.tiny_models import tiny_tokenizer


class Noisy:
    """Rows of noise from generators of all kinds, one of them its own."""

    def __init__(self) -> None:
        self.torch, self.numpy = torch.Generator().manual_seed(1), np.random.default_rng(1)
        self.old, self.python, self.read = np.random.RandomState(1), random.Random(1), 0

    def __len__(self) -> int:
        return 5

    def __getitem__(self, row: int) -> dict[str, Any]:
        self.read += 1
        own = [torch.rand((), generator=self.torch).item(), self.numpy.random(), self.old.rand(), self.python.random()]
        return {"x": [*own, torch.rand(()).item(), np.random.rand(), random.random()], "labels": row}


class Stream(IterableDataset):
    def __init__(self, rows: list[Any]) -> None:
        self.rows, self.begun = rows, 0

    def __iter__(self) -> Iterator[Any]:
        self.begun += 1
        return iter(self.rows)


def next_numbers(data: Noisy) -> list[Any]:
    return [data.read, *data[0]["x"]]


def masking() -> DataCollatorForLanguageModeling:
    """A collator with a generator of its own, which it makes at its first batch."""
    tokenizer = tiny_tokenizer()
    tokenizer.mask_token = "</s>"
    return DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.5, seed=3)


def fingerprint(rows: Any, collate: Callable = default_data_collator, *, seed: int = 0) -> str:
    return describe_rows(rows, collate, seed=seed)["fingerprint"]


def test_a_fingerprint_consumes_no_random_numbers():
    def seeded(first: Callable[[Noisy], Any]) -> list[Any]:
        torch.manual_seed(5)
        np.random.seed(5)
        random.seed(5)
        first(data := Noisy())
        return next_numbers(data)

    assert seeded(fingerprint) == seeded(lambda data: None)


def test_a_collator_that_draws_by_itself_draws_on_as_before():
    rows = runs.token_rows(6)
    found = []
    for takes in (True, False):
        collate = masking()
        if takes:
            fingerprint(rows, collate)
        found.append(collate([{"input_ids": row["input_ids"]} for row in rows])["labels"])
    assert torch.equal(*found)


def test_a_fingerprint_of_random_rows_is_the_same_again():
    torch.manual_seed(1)
    first = fingerprint(Noisy())
    torch.manual_seed(2)
    assert fingerprint(Noisy()) == first


def test_numbers_from_out_of_reach_do_not_count():
    hidden = iter(range(10_000))

    def collate(rows: list[Any]) -> dict[str, torch.Tensor]:
        return {**default_data_collator(rows), "noise": torch.full((len(rows), 1), float(next(hidden)))}

    rows, other = runs.token_rows(6), runs.token_rows(6, seed=1)
    assert fingerprint(rows, collate) == fingerprint(rows, collate) != fingerprint(other, collate)


def test_a_mapping_of_the_same_rows_gives_the_same_fingerprint():
    assert fingerprint(runs.token_rows(6)) == fingerprint(tuple(runs.token_rows(6)))


@pytest.mark.parametrize("row", [0, 3, 9])
@pytest.mark.parametrize("column", ["input_ids", "labels", "attention_mask"])
def test_every_value_of_few_rows_counts(row, column):
    rows = runs.token_rows(10)
    before = fingerprint(rows)
    rows[row] = {**rows[row], column: [*rows[row][column][:-1], 0]}
    assert fingerprint(rows) != before


def test_the_number_of_rows_that_are_read_is_bounded():
    read = set()

    class Many:
        def __len__(self) -> int:
            return 10**6

        def __getitem__(self, row: int) -> dict[str, Any]:
            read.add(row)
            return {"x": [row], "labels": 0}

    fingerprint(Many())
    assert len(read) == SAMPLED_ROWS
    assert {0, 10**6 - 1} <= read


def test_columns_and_packing_are_found():
    def packed(rows: list[Any]) -> dict[str, torch.Tensor]:
        return {name: value.reshape(1, -1) for name, value in default_data_collator(rows).items()}

    rows = runs.token_rows(6)
    assert describe_rows(rows, default_data_collator, seed=0)["columns"] == ["attention_mask", "input_ids", "labels"]
    assert describe_rows(rows, packed, seed=0)["packs"]
    assert not describe_rows(rows, default_data_collator, seed=0)["packs"]
    assert not describe_rows(rows[:1], packed, seed=0)["packs"]


def test_a_stream_is_known_by_its_first_rows():
    rows = runs.token_rows(40)
    first, same, other = (Stream(r) for r in (rows, rows[:20], runs.token_rows(40, seed=1)))
    found = [describe_stream(s, default_data_collator, seed=0)["fingerprint"] for s in (first, same, other)]
    assert found[0] == found[1] != found[2]
    assert first.begun == 0  # what it counts is put back
