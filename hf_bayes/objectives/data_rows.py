"""Check rows of data at the entrance: that there are some, and that the collator can read each of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sized
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

_EXPECTED = "a list or data set of rows, each a mapping such as {'input_ids': [...], 'labels': [...]}"


_OF_LABELS = (
    "DataCollatorForTokenClassification(tokenizer) for labels of tokens (DataCollatorForSeq2Seq(tokenizer) for a "
    "language model)"
)
"""Collators that pad labels."""

_LABELS = ("label", "labels", "label_ids")
"""The names under which the collators of transformers read labels."""


def require_dataset(dataset: Any, name: str, why: str = "N is needed to scale the likelihood") -> None:
    """Raise a ValueError for a value that holds no rows: a text, a number, splits by name, an empty list.

    Args:
        name: the name of the data in messages.
        why: the reason why rows are needed.
    """
    if isinstance(dataset, Mapping):
        raise ValueError(
            f"{name} is a mapping with the keys {', '.join(map(repr, list(dataset)[:5]))}, expected {_EXPECTED}: give "
            "one of its splits"
        )
    has_rows = hasattr(dataset, "__getitem__") or hasattr(dataset, "__iter__")
    if isinstance(dataset, str | bytes) or not has_rows:
        raise ValueError(f"{name} must be {_EXPECTED}, got {dataset!r:.100}: encode texts with a tokenizer first")
    if isinstance(dataset, Sized) and not isinstance(dataset, DataLoader) and len(dataset) == 0:
        raise ValueError(f"{name} has 0 rows; {why}: give it data")


def in_words(collate: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return ``collate`` with another error where it fails for a row that is no mapping, text, or unequal lengths.

    Args:
        collate: rows -> a batch. A collator may read rows that are not mappings; then it does not fail.
        name: the name of the data in messages.
    """

    def collated(rows: Any) -> Any:
        try:
            return collate(rows)
        except Exception as error:
            odd = [row for row in rows if not isinstance(row, Mapping) and not hasattr(row, "__dict__")]
            if not odd:
                _refuse_text(collate, rows, name, error)
                _refuse_unequal(rows, name, error)
                raise
            raise ValueError(
                f"{name} has a row that the data collator cannot read: {odd[0]!r:.100} ({type(odd[0]).__name__}). "
                f"Expected {_EXPECTED}: encode texts with a tokenizer, leave out what is missing, or give a collator "
                "that reads such rows"
            ) from error

    return collated


def _refuse_text(collate: Callable[..., Any], rows: Any, name: str, error: Exception) -> None:
    """Raise if columns of text are the reason for ``error``: without them ``collate`` makes a batch."""
    if not all(isinstance(row, Mapping) for row in rows):
        return
    columns = [column for column in rows[0] if any(_is_text(row.get(column)) for row in rows)]
    if not columns:
        return
    try:
        collate([{column: value for column, value in row.items() if column not in columns} for row in rows])
    except Exception:
        return  # some collators skip text, and others read it
    advice = [_encoding(rows[0], column) for column in columns if column in _LABELS]
    if unused := [column for column in columns if column not in _LABELS]:
        advice.append(
            f"leave {', '.join(map(repr, unused))} out, by remove_columns({unused}) of the data set, or "
            "remove_unused_columns=True in a trainer's arguments"
        )
    raise ValueError(
        f"{name} has text in {', '.join(map(repr, columns))}, of which the data collator made no batch "
        f"({error!s:.200}): {'; '.join(advice)}"
    ) from error


def _encoding(row: Mapping[str, Any], column: str) -> str:
    """Return how to encode the names of classes in a column of labels."""
    if not isinstance(row.get(column), str):
        return f"encode the classes in {column!r} as integers"
    return (
        f'encode the classes in {column!r} as integers, by data.class_encode_column("{column}") of the data set before '
        "it is split, so that all splits have the same numbers"
    )


def _refuse_unequal(rows: Any, name: str, error: Exception) -> None:
    """Raise if the collator failed with ``error`` on mappings whose sequences have unequal shapes: it did not pad."""
    if not isinstance(error, (ValueError, RuntimeError)) or not all(isinstance(row, Mapping) for row in rows):
        return  # torch and numpy raise these for tensors of unequal shapes
    for column in sorted(rows[0], key=lambda name: name != "labels"):  # a collator may pad all columns but labels
        shapes = sorted({shape for row in rows if (shape := _shape(row.get(column))) is not None})
        if len(shapes) > 1:
            raise ValueError(
                f"{name} has rows of unequal length (shapes {list(shapes[0])} and {list(shapes[-1])} in {column!r}), "
                f"of which the data collator made no batch ({error!s:.200}): {_advice(rows[0], column, error)}"
            ) from error


def _advice(row: Mapping[str, Any], column: str, error: Exception) -> str:
    """Return what to do about a collator that did not pad a column."""
    if "padding token" in str(error):  # the collator pads, and its tokenizer cannot
        return "give the tokenizer a padding token, tokenizer.pad_token = tokenizer.eos_token"
    collator = _OF_LABELS if column == "labels" else "DataCollatorWithPadding(tokenizer)"
    if not any(name in row for name in _LABELS):
        collator += " (DataCollatorForLanguageModeling(tokenizer, mlm=False) for a language model)"
    return (
        f"give a collator that pads {column!r}, such as transformers.{collator}, as collate= of a function or "
        "data_collator= of a trainer"
    )


def _is_text(value: Any) -> bool:
    """Return whether a value is a text or a list of texts, such as the words of a sentence."""
    return isinstance(value[0] if isinstance(value, (list, tuple)) and value else value, str)


def _shape(value: Any) -> tuple[int, ...] | None:
    """Return the shape of a tensor, an array, or a list; None for other values."""
    if isinstance(value, (list, tuple)):
        return (len(value),)
    shape = getattr(value, "shape", None)
    return None if shape is None else tuple(shape)


def is_stream(dataset: Any) -> bool:
    """Return whether a data set is a stream: its rows come in an order of their own, and their number is unknown."""
    return isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__")
