"""The evaluation of a language model on windows of texts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase, default_data_collator

from hf_bayes.cli.data import texts_in
from hf_bayes.cli.evaluation.case import Case, Collate, Target
from hf_bayes.cli.evaluation.classes import scored_classes
from hf_bayes.cli.parsing import check_count
from hf_bayes.cli.token_windows import token_windows, window_length
from hf_bayes.metrics.figures import NEXT_TOKENS


@dataclass
class WindowArguments:
    """The windows of a language model."""

    _argument_group_name = "windows of a language model"

    length: int | None = field(
        default=None, metadata={"help": "Tokens of a window. Default: 128, or the model's context if less."}
    )
    max_windows: int = field(default=200, metadata={"help": "Largest number of windows of each text, evenly spread."})

    def __post_init__(self) -> None:
        check_count("max_windows", self.max_windows, "windows of a text")


def windows_of(
    path: str, tokenizer: PreTrainedTokenizerBase, *, length: int, limit: int, text_column: str = "text"
) -> Dataset:
    """Return rows of ``length`` tokens and their labels. The texts of a file with rows are joined to one.

    No token is a label twice: the last row starts earlier instead of being short, and its labels are -100 at tokens of
    an earlier row. No end-of-sequence token follows the text.

    Raises:
        ValueError, OSError: for a text shorter than a window, for several texts without a token to join them by, and as
            ``texts_in``.
    """
    texts = texts_in(path, text_column)
    joins = len(texts) > 1
    if joins and tokenizer.eos_token_id is None:
        raise ValueError(
            f"{path} has {len(texts)} texts, joined by the end-of-sequence token, and the tokenizer has none: "
            "give one text in a .txt file"
        )
    rows = token_windows(Dataset.from_dict({"text": texts}), tokenizer, length=length, join=joins, close=False)
    if len(rows[0]["input_ids"]) < length:
        raise ValueError(f"{path} is shorter than one window of {length} tokens: give more text or a smaller --length")
    count = min(limit, len(rows))
    return rows.select([i * len(rows) // count for i in range(count)]).select_columns(["input_ids", "labels"])


def window_sets(
    files: Mapping[str, str], tokenizer: PreTrainedTokenizerBase, target: Target, args: WindowArguments
) -> dict[str, Dataset]:
    """Read the text of each file and cut it into windows. Every set has the labels of ``windows_of``.

    Raises:
        ValueError: for windows longer than the model's context, and as ``windows_of``.
    """
    length = window_length(args.length, target.context, default=128, flag="--length")
    how: dict[str, Any] = {"length": length, "limit": args.max_windows, "text_column": target.text_column}
    return {name: windows_of(file, tokenizer, **how) for name, file in files.items()}


def collate_windows(tokenizer: PreTrainedTokenizerBase, sets: Mapping[str, Dataset], args: WindowArguments) -> Collate:
    """Return the collator of rows of one length."""
    return default_data_collator


WINDOW_CASE = Case(
    arguments=WindowArguments,
    figures=NEXT_TOKENS,
    read=window_sets,
    collate=collate_windows,
    scored=scored_classes,
    unscored=scored_classes,
)
