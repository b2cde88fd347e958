"""Padding of batches: all rows to one length, or each batch to its own longest row."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any, Literal

import pyarrow.compute
from datasets import Dataset
from transformers import DataCollatorWithPadding, PreTrainedTokenizerBase

Padding = Literal["data", "batch"]

MAX_RATIO = 4.0
"""The ratio of the padded length to the mean length of rows, above which padding to one length costs too much."""

_NO_LIMIT = 10**20
"""The length from which a tokenizer has no limit: transformers writes 10**30."""


def give_padding(tokenizer: PreTrainedTokenizerBase, config: Any = None) -> None:
    """Give a tokenizer without a padding token the token of a model's config, or else its end-of-sequence token.

    A config without the token gets it, too: decoders classify by the last token that is not padding.
    """
    padding = getattr(config, "pad_token_id", None)
    if padding is not None and not 0 <= padding < len(tokenizer):  # such as the -1 of some older configs
        padding = None
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token if padding is None else tokenizer.convert_ids_to_tokens(padding)
    if config is not None and padding is None:
        config.pad_token_id = tokenizer.pad_token_id


def give_length(tokenizer: PreTrainedTokenizerBase, longest: int | None, *, has_table: bool) -> None:
    """Lower the length to which a tokenizer cuts texts to the model's context.

    A larger limit of the tokenizer stays if the model can read beyond its context, as with rotary positions.

    Args:
        longest: tokens of the model's context, see ``input_check.context_of``; None for no limit.
        has_table: whether a table of positions ends there.
    """
    if longest is not None and (has_table or tokenizer.model_max_length > _NO_LIMIT):
        tokenizer.model_max_length = min(tokenizer.model_max_length, longest)


def padding_collator(
    tokenizer: PreTrainedTokenizerBase, rows: Iterable[Dataset], *, padding: Padding
) -> DataCollatorWithPadding:
    """Return a collator that pads encoded rows.

    Rows of one length give every batch the same shape. Every pass of the members then takes the same memory, and
    ``trunk_memory_gib`` can reuse the output of the trunk, which depends on the padding.

    Args:
        rows: all data sets that will be collated, with ``input_ids``.
        padding: "data" pads every batch to the longest row of all data sets, "batch" to its own longest row.
    Raises:
        ValueError: for another ``padding``.
    """
    if padding == "batch":
        return DataCollatorWithPadding(tokenizer)
    if padding != "data":
        raise ValueError(
            f"padding must be 'data' (one length) or 'batch' (the longest row of a batch), got {padding!r}"
        )
    return DataCollatorWithPadding(tokenizer, padding="max_length", max_length=longest_row(rows))


def row_lengths(rows: Dataset) -> list[int]:
    """Return the number of tokens in each encoded row. Arrow knows them without making Python lists of tokens."""
    lengths: list[int] = pyarrow.compute.list_value_length(rows.with_format("arrow")[:]["input_ids"]).to_pylist()
    return lengths


def longest_row(rows: Iterable[Dataset]) -> int:
    """Return the number of tokens of the longest row. A warning says if padding all rows to it costs too much.

    Args:
        rows: all data sets that will be collated, with ``input_ids``.
    """
    lengths = [length for part in rows for length in row_lengths(part)]
    longest, mean = max(lengths), sum(lengths) / len(lengths)
    if longest > MAX_RATIO * mean:
        warnings.warn(
            f"rows are padded to {longest} tokens, {longest / mean:.0f} times their mean of {mean:.0f}: cut the long "
            "rows (max_length), or pad each batch to its own longest row (padding='batch')"
        )
    return longest
