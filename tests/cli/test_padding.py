from __future__ import annotations

import warnings
from typing import Any

import pytest
from datasets import Dataset
from transformers import PreTrainedTokenizerFast

from hf_bayes.cli.padding import give_length, give_padding, padding_collator, row_lengths
from tests.tiny_models import tiny_gpt2, tiny_tokenizer


def rows_of(*lengths: int) -> Dataset:
    return Dataset.from_list([{"input_ids": [5] * n, "attention_mask": [1] * n, "labels": 0} for n in lengths])


def test_all_batches_have_the_longest_length_of_all_data(tokenizer: PreTrainedTokenizerFast) -> None:
    train, validation = rows_of(2, 4), rows_of(6)
    collate = padding_collator(tokenizer, [train, validation], padding="data")
    batch = collate([train[0], train[1]])
    assert batch["input_ids"].tolist() == [[5, 5, 0, 0, 0, 0], [5, 5, 5, 5, 0, 0]]
    assert batch["attention_mask"].sum(1).tolist() == [2, 4]
    assert collate([validation[0]])["input_ids"].shape == (1, 6)


@pytest.mark.parametrize(("known", "token"), [(None, "</s>"), (-1, "</s>"), (1, "<s>")])
def test_a_missing_padding_token_is_the_same_for_both(known: int | None, token: str) -> None:
    tokenizer, config = tiny_tokenizer(), tiny_gpt2(pad_token_id=known).config
    tokenizer.pad_token = None
    give_padding(tokenizer, config)
    assert tokenizer.pad_token == token
    assert config.pad_token_id == tokenizer.pad_token_id


@pytest.mark.parametrize(
    ("limit", "longest", "has_table", "length"),
    [
        (10**30, 64, True, 64),
        (10**30, 64, False, 64),
        (32, 64, True, 32),
        (32, None, False, 32),
        (128, 64, True, 64),
        (128, 64, False, 128),  # rotary positions go on
    ],
)
def test_a_tokenizer_cuts_no_later_than_the_model_reads(
    limit: int, longest: int | None, has_table: bool, length: int
) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.model_max_length = limit
    give_length(tokenizer, longest, has_table=has_table)
    assert tokenizer.model_max_length == length


def test_lengths_are_those_of_the_rows() -> None:
    rows = rows_of(2, 0, 6)
    assert row_lengths(rows) == [2, 0, 6]
    assert row_lengths(rows.select([2, 0])) == [6, 2]  # the table still has all rows


def test_batches_are_padded_alone_on_request(tokenizer: PreTrainedTokenizerFast) -> None:
    train = rows_of(2, 4, 9)
    collate = padding_collator(tokenizer, [train], padding="batch")
    assert collate([train[0], train[1]])["input_ids"].shape == (2, 4)


@pytest.mark.parametrize(("lengths", "warned"), [([4, 5, 30], False), ([4] * 20 + [60], True)])
def test_one_long_row_among_short_rows_is_warned_about(
    tokenizer: PreTrainedTokenizerFast, lengths: list[int], warned: bool
) -> None:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        padding_collator(tokenizer, [rows_of(*lengths)], padding="data")
    expected = "padded to 60 tokens, 9 times their mean of 7: cut the long rows"
    assert [expected in str(each.message) for each in found] == [True] * warned


def test_another_padding_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    wrong: Any = "longest"
    with pytest.raises(ValueError, match=r"must be 'data' .* or 'batch' .*, got 'longest'"):
        padding_collator(tokenizer, [rows_of(2)], padding=wrong)
