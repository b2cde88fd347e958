"""Labelled text for the training scripts: what a column of labels asks of a head, and the rows that train it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from datasets import ClassLabel, Dataset, DatasetDict, LargeList, List

from hf_bayes.cli.data import check_split, check_texts


class LabelledText(NamedTuple):
    """What a sequence classifier is trained on.

    Attributes:
        splits: rows ``input_ids``, ``attention_mask``, ``labels``, and of pairs ``token_type_ids`` where the tokenizer
            has them.
        head: fields of the model's config that make its head answer such labels: ``num_labels``, ``problem_type`` and,
            of classes, ``id2label`` and ``label2id``.
    """

    splits: DatasetDict
    head: dict[str, Any]


class _Labels(NamedTuple):
    """One kind of labels.

    Attributes:
        head: as of ``LabelledText``.
        read: from what the column holds to the label; raises LookupError or ValueError for what is no label.
        expected: of a label, in words.
        advice: what to do about rows without.
    """

    head: dict[str, Any]
    read: Callable[[Any], Any]
    expected: str
    advice: str


def labelled_text(
    splits: DatasetDict,
    tokenizer: Any,
    *,
    text_column: str = "text",
    pair_column: str | None = None,
    label_column: str = "label",
    numbers: bool = False,
    max_length: int | None = None,
) -> LabelledText:
    """Encode texts (or pairs of texts) and their labels.

    A column of lists gives each text several labels of their own (multi-label), any other one class each. Classes are
    those of the data set's own ``ClassLabel``, or else the distinct values of the training split, sorted.

    Args:
        splits: rows of text, "train" among them.
        tokenizer: any tokenizer of transformers.
        text_column: the column of the text.
        pair_column: the column of a second text, as of a premise and its hypothesis.
        label_column: the column of the labels.
        numbers: labels are numbers to be predicted (a regression), and no classes.
        max_length: tokens kept of a row; None: what the tokenizer says its model takes.
    Raises:
        ValueError: for a missing column, fewer than two classes, and for a label that is missing, no finite number
            where numbers are asked for, or one that the training split lacks.
    """
    for name, split in splits.items():
        for column in [text_column, *([] if pair_column is None else [pair_column])]:
            check_texts(split, column, f"the split {name!r}")
        check_split(split, label_column, f"the split {name!r}")
    labels = _labels_of(splits["train"], label_column, numbers=numbers)

    def encode(batch: dict[str, list[Any]], rows: list[int], split: str) -> dict[str, Any]:
        answers = []
        for row, label in zip(rows, batch[label_column], strict=True):
            try:
                answers.append(labels.read(label))
            except (LookupError, TypeError, ValueError):
                raise ValueError(
                    f"row {row} of the split {split!r} has the label {label!r}, expected {labels.expected}: "
                    f"{labels.advice}"
                ) from None
        texts = [batch[text_column], *([] if pair_column is None else [batch[pair_column]])]
        encoded = tokenizer(*texts, truncation=True, max_length=max_length)
        if pair_column is None:
            encoded.pop("token_type_ids", None)  # which half a token is of; GPT-2 would add an embedding for "neither"
        return {**encoded, "labels": answers}

    encoded = {
        name: split.map(
            encode, batched=True, with_indices=True, fn_kwargs={"split": name}, remove_columns=split.column_names
        )
        for name, split in splits.items()
    }
    return LabelledText(DatasetDict(encoded), labels.head)


def _labels_of(train: Dataset, column: str, *, numbers: bool) -> _Labels:
    feature = train.features[column]
    if numbers:
        head = {"num_labels": 1, "problem_type": "regression"}
        return _Labels(head, _number, "a finite number", "drop such rows, or leave noise_std out for classes")
    several = isinstance(feature, (List, LargeList))
    inner = feature.feature if several else feature
    if isinstance(inner, ClassLabel):
        names = list(inner.names)
        index: dict[Any, int] = {number: number for number in range(len(names))}
    else:
        found = _values(train[column] if several else [train.unique(column)])
        if any(isinstance(value, float) for value in found):
            raise ValueError(
                f"the column {column!r} holds fractions, expected classes: integers or strings. To predict the numbers "
                "themselves give noise_std, the standard deviation of their noise"
            )
        index = {value: number for number, value in enumerate(sorted(found))}
        names = [str(value) for value in index]
    if len(names) < (1 if several else 2):
        raise ValueError(f"classification needs two classes or more, the column {column!r} has {names}")
    head = {
        "num_labels": len(names),
        "problem_type": "multi_label_classification" if several else "single_label_classification",
        "id2label": dict(enumerate(names)),
        "label2id": {name: number for number, name in enumerate(names)},
    }
    advice = "drop such rows, or add examples of that class to the training split"
    if not several:
        return _Labels(head, index.__getitem__, f"one of {names}", advice)

    def several_of(label: Iterable[Any]) -> list[float]:
        chosen = {index[value] for value in label}
        return [float(number in chosen) for number in range(len(names))]

    return _Labels(head, several_of, f"a list out of {names}", advice)


def _values(rows: Iterable[Iterable[Any] | None]) -> set[Any]:
    """Of all rows; what is missing is found again, with its place, when rows are read."""
    return {value for row in rows for value in row or ()} - {None}


def _number(label: Any) -> float:
    value = float(label)
    if isinstance(label, str) or not math.isfinite(value):
        raise ValueError
    return value
