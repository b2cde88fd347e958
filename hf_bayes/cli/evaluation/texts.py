"""The rows of an evaluation of texts with labels: columns, encoded texts, and padding."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from hf_bayes.cli.data import load_rows
from hf_bayes.cli.evaluation.case import TEST, Collate
from hf_bayes.cli.labels import check_columns, unlabelled_text
from hf_bayes.cli.padding import Padding, padding_collator
from hf_bayes.cli.parsing import check_count


@dataclass
class TextArguments:
    """The columns and the padding of labelled texts."""

    _argument_group_name = "labelled texts"

    pair_column: str | None = field(default=None, metadata={"help": "Column of a second text, if rows are pairs."})
    label_column: str = field(default="label", metadata={"help": "Column of the test rows' labels."})
    max_length: int | None = field(default=None, metadata={"help": "Tokens kept of a text. Default: all that fit."})
    padding: Padding = field(
        default="data",
        metadata={"help": "Pad every batch to the longest row of the data, or to that of the batch."},
    )

    def __post_init__(self) -> None:
        check_count("max_length", self.max_length, "the tokens kept of a text")


def text_sets(
    files: Mapping[str, str],
    tokenizer: PreTrainedTokenizerBase,
    args: TextArguments,
    *,
    text_column: str,
    labels_of: Callable[[Dataset, str], list[Any]],
    placeholder: Any,
) -> dict[str, Dataset]:
    """Read and encode the rows of each file. Only the rows of the test set have labels of their own.

    Args:
        files: name -> file.
        text_column: the column of the text.
        labels_of: a function of the test rows and the name of their file. It returns their labels.
        placeholder: the label of all other rows.
    Raises:
        OSError, ValueError: for a file that cannot be read, a missing column, one column with two uses, or a label
            that does not fit the model.
    """
    check_columns(text_column, args.pair_column, args.label_column)
    columns: dict[str, Any] = {"text_column": text_column, "pair_column": args.pair_column}
    sets = {}
    for name, file in files.items():
        rows = load_rows(file)
        labels = labels_of(rows, file) if name == TEST else [placeholder] * len(rows)
        encoded = unlabelled_text(rows, tokenizer, what=file, max_length=args.max_length, **columns)
        sets[name] = encoded.add_column("labels", labels)
    return sets


def collate_texts(tokenizer: PreTrainedTokenizerBase, sets: Mapping[str, Dataset], args: TextArguments) -> Collate:
    """Return the collator of encoded texts."""
    return padding_collator(tokenizer, sets.values(), padding=args.padding)
