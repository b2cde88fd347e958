"""Labelled text for the scripts: encoded rows, and the settings of the head that predicts the labels."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from datasets import ClassLabel, Dataset, DatasetDict, LargeList, List

from hf_bayes.cli.data import check_split, check_texts
from hf_bayes.cli.padding import row_lengths
from hf_bayes.cli.row_places import if_filled, place_of

_KINDS = {
    str: "text", int: "integers", float: "decimal numbers", bool: "true or false", list: "lists", dict: "mappings",
}  # fmt: skip
"""The kinds of values in a row of JSON -> words for them."""
_TARGETS = "a command predicts one number for a text; several need the classes of Python, see docs/models.md"


class LabelledText(NamedTuple):
    """The training data of a sequence classifier.

    Attributes:
        splits: rows ``input_ids``, ``attention_mask``, ``labels``. Pairs of texts also have ``token_type_ids`` if the
            tokenizer has them.
        head: the fields of the model's config for such labels: ``num_labels`` and ``problem_type``. Classes also have
            ``id2label`` and ``label2id``.
    """

    splits: DatasetDict
    head: dict[str, Any]


class LabelReader(NamedTuple):
    """The way to read a kind of labels.

    Attributes:
        head: see ``LabelledText``.
        read: a function from a value of the column to the label. It raises LookupError or ValueError for other values.
        expected: the expected values, for the error message.
        advice: the advice about other values, for the error message.
    """

    head: dict[str, Any]
    read: Callable[[Any], Any]
    expected: str
    advice: str


class TextLabels(NamedTuple):
    """The labels of all splits, before the texts are encoded.

    Attributes:
        labels: the name of a split -> the label of each row.
        head: see ``LabelledText``.
    """

    labels: dict[str, list[Any]]
    head: dict[str, Any]


def labelled_text(
    splits: DatasetDict, tokenizer: Any, *, max_length: int | None = None, **columns: Any
) -> LabelledText:
    """Read the labels of texts (or of pairs of texts), and encode the texts.

    Args:
        splits: rows of text. There must be a split "train".
        tokenizer: any tokenizer of transformers.
        max_length: the largest number of tokens in a row. None uses the limit of the tokenizer.
        columns: the other arguments of ``text_labels``.
    Raises:
        ValueError: as ``text_labels`` and ``encoded_text``.
    """
    found = text_labels(splits, **columns)
    both = {name: columns[name] for name in ("text_column", "pair_column", "place") if name in columns}
    return LabelledText(encoded_text(splits, tokenizer, found.labels, max_length=max_length, **both), found.head)


def text_labels(
    splits: DatasetDict,
    *,
    text_column: str = "text",
    pair_column: str | None = None,
    label_column: str = "label",
    numbers: bool = False,
    place: Callable[[str, int], str] | None = None,
    known: Sequence[str] | None = None,
) -> TextLabels:
    """Return the labels of all rows, and the settings of a head that predicts them.

    A column of lists gives each text several labels (multi-label). Any other column gives each text one class. The
    classes come from the data set's ``ClassLabel``, or else are the sorted distinct values of the training split. If
    the model already predicts classes of the same names, they keep its order, which is that of the rows of its head.

    Args:
        splits: rows of text. There must be a split "train".
        text_column: the column of the text.
        pair_column: the column of a second text, such as the hypothesis beside a premise.
        label_column: the column of the labels.
        numbers: True if labels are numbers to predict (a regression) instead of classes. Decimal numbers always are.
        place: a function from a split and the number of a row to words for it, for errors.
        known: the names of the classes that the model already predicts, in its order. If there are as many of them as
            classes, and the names differ, there is a warning.
    Raises:
        ValueError: for a missing column, fewer than two classes, or a label that is missing, not finite in a
            regression, or not in the training split.
    """
    check_columns(text_column, pair_column, label_column)
    place = place or _in_split
    for name, split in splits.items():
        for column in [text_column, *([] if pair_column is None else [pair_column])]:
            check_texts(split, column, f"the split {name!r}", place=partial(place, name))
        check_split(split, label_column, f"the split {name!r}")
    reader = _labels_of(splits["train"], label_column, numbers=numbers, known=known)
    labels = {name: read_labels(split[label_column], reader, partial(place, name)) for name, split in splits.items()}
    return TextLabels(labels, reader.head)


def encoded_text(
    splits: DatasetDict,
    tokenizer: Any,
    labels: Mapping[str, list[Any]],
    *,
    text_column: str = "text",
    pair_column: str | None = None,
    max_length: int | None = None,
    longest: int | None = None,
    place: Callable[[str, int], str] | None = None,
) -> DatasetDict:
    """Return the rows of ``LabelledText.splits``.

    Args:
        splits, text_column, pair_column, place: as in ``text_labels``.
        tokenizer, max_length: as in ``labelled_text``.
        labels: the name of a split -> the label of each row.
        longest: the tokens that the model can read at most; None for a model without such a limit.
    Raises:
        ValueError: naming the first row without a token, or with more than ``longest`` of them.
    """
    place = place or _in_split
    encode = _encoder(tokenizer, text_column, pair_column, max_length)
    encoded = DatasetDict()
    for name, split in splits.items():
        rows = split.map(encode, batched=True, remove_columns=split.column_names)
        _check_lengths(rows, partial(place, name), longest)
        encoded[name] = rows.add_column("labels", labels[name])
    return encoded


def _in_split(name: str, row: int) -> str:
    return place_of(f"the split {name!r}", row)


def _check_lengths(rows: Dataset, place: Callable[[int], str], longest: int | None) -> None:
    """Check that each row has a token, and at most ``longest`` of them (None: any number)."""
    for row, length in enumerate(row_lengths(rows)):
        if not length:
            raise ValueError(f"{place(row)} has no token, expected text to predict a label from: leave the row out")
        if longest is not None and length > longest:
            raise ValueError(
                f"{place(row)} has {length} tokens, more than the model's context of {longest}, and its table of "
                f"positions ends there: lower max_length to {longest}"
            )


def unlabelled_text(
    rows: Dataset,
    tokenizer: Any,
    *,
    what: str,
    text_column: str = "text",
    pair_column: str | None = None,
    max_length: int | None = None,
) -> Dataset:
    """Encode texts (or pairs of texts) without labels.

    Args:
        what: the name of the rows in errors.
        tokenizer, text_column, pair_column, max_length: as in ``labelled_text``.
    Raises:
        ValueError: for a missing column, and a row without text or without a token.
    """
    for column in [text_column, *([] if pair_column is None else [pair_column])]:
        check_texts(rows, column, what)
    encode = _encoder(tokenizer, text_column, pair_column, max_length)
    encoded = rows.map(encode, batched=True, remove_columns=rows.column_names)
    _check_lengths(encoded, partial(place_of, what), None)
    return encoded


def check_columns(text_column: str, pair_column: str | None, label_column: str) -> None:
    """Check that the columns of the text, of the second text (None if there is none) and of the label differ.

    Raises:
        ValueError: if two are the same.
    """
    columns = [text_column, label_column, *([] if pair_column is None else [pair_column])]
    if len(set(columns)) < len(columns):
        raise ValueError(
            f"the columns of the text, the second text and the label must differ, got {', '.join(columns)}: the label "
            "would be part of what it is predicted from"
        )


def _encoder(
    tokenizer: Any, text_column: str, pair_column: str | None, max_length: int | None
) -> Callable[[dict[str, list[Any]]], dict[str, Any]]:
    """Return the function from a batch of texts to ``input_ids`` and the other inputs of the model."""

    def encode(batch: dict[str, list[Any]]) -> dict[str, Any]:
        texts = [batch[text_column], *([] if pair_column is None else [batch[pair_column]])]
        encoded = tokenizer(*texts, truncation=True, max_length=max_length)
        if pair_column is None:
            encoded.pop("token_type_ids", None)  # GPT-2 would add an embedding for the one segment
        return dict(encoded)

    return encode


def read_labels(values: Iterable[Any], labels: LabelReader, place: Callable[[int], str]) -> list[Any]:
    """Return the labels of rows.

    Args:
        place: a function from the number of a row to words for it.
    Raises:
        ValueError: naming the first row with another value.
    """
    answers = []
    for row, value in enumerate(values):
        try:
            answers.append(labels.read(value))
        except (LookupError, TypeError, ValueError):
            where = place(row)
            raise ValueError(
                f"{where} has the label {value!r}, expected {labels.expected}: {labels.advice}"
                + (if_filled(where) if value is None else "")
            ) from None
    return answers


def _labels_of(train: Dataset, column: str, *, numbers: bool, known: Sequence[str] | None) -> LabelReader:
    feature = train.features[column]
    several, given = classes_in(feature)
    if numbers:
        if several:
            raise ValueError(f"the column {column!r} holds lists, expected a number for each text: {_TARGETS}")
        return NUMBERS
    if isinstance(feature, dict):
        raise ValueError(
            f"the column {column!r} holds mappings, expected a class, a list of classes or a number: name another"
        )
    if given is not None:
        names = list(given.values())
        index: dict[Any, int] = {key: number for number, name in given.items() for key in (number, name)}
    else:
        found = _classes(train[column] if several else [train[column]], column)
        if any(isinstance(value, float) for value in found):
            # in a table with empty cells, classes that were integers have a decimal point, too
            if not several and not all(float(value).is_integer() for value in found if math.isfinite(value)):
                return NUMBERS
            one = "(A table with empty cells has 1.0 in place of 1.) To predict a number for each text, set regression"
            raise ValueError(
                f"the column {column!r} holds {'lists of ' if several else ''}numbers with a decimal point, expected "
                f"classes: integers or strings. {f'For targets: {_TARGETS}' if several else one}"
            )
        index = {value: number for number, value in enumerate(sorted(found))}
        names = [str(value) for value in index]
    if len(names) < (1 if several else 2):
        raise ValueError(f"classification needs two classes or more, the column {column!r} has {names}")
    ordered = _in_order_of(names, known)
    index = {value: ordered.index(names[number]) for value, number in index.items()}
    names = ordered
    head = {
        "num_labels": len(names),
        "problem_type": "multi_label_classification" if several else "single_label_classification",
        "id2label": dict(enumerate(names)),
        "label2id": {name: number for number, name in enumerate(names)},
    }
    advice = "drop such rows, or add examples of that class to the training split"
    if not several:
        return LabelReader(head, index.__getitem__, f"one of the {len(names)} classes ({some(names)})", advice)

    def several_of(label: Iterable[Any]) -> list[float]:
        chosen = {index[value] for value in label}
        return [float(number in chosen) for number in range(len(names))]

    return LabelReader(head, several_of, f"a list out of the {len(names)} labels ({some(names)})", advice)


def _in_order_of(names: list[str], known: Sequence[str] | None) -> list[str]:
    """Return the names in the order of the ``known`` ones if these are the same; warn if only their number is."""
    if known is None or len(known) != len(names):  # the head of the model is then made anew
        return names
    if sorted(names) == sorted(known):
        return list(known)
    warnings.warn(
        f"the model predicts {len(known)} classes ({some(known)}), and the data set has as many of other names "
        f"({some(names)}): training goes on from the model's head, with the new names in its order. If the classes "
        "are others, give a model without this head"
    )
    return names


def classes_in(feature: Any) -> tuple[bool, dict[int, str] | None]:
    """Return whether a column holds lists, and the name of each class; None for classes without names.

    A column of ``datasets`` has -1 for an unknown label. It is no key here; in a list it would be the last class.
    """
    several = isinstance(feature, (List, LargeList))
    inner = feature.feature if several else feature
    return several, dict(enumerate(inner.names)) if isinstance(inner, ClassLabel) else None


def _classes(rows: Iterable[Iterable[Any] | None], column: str) -> set[Any]:
    """Return the values in all rows, which must be of one kind. A missing value is refused later, with its row."""
    values = [value for row in rows for value in row or () if value is not None]
    if len(kinds := {type(value) for value in values}) > 1:
        named = ", ".join(sorted(_KINDS.get(kind, kind.__name__) for kind in kinds))
        raise ValueError(
            f"the column {column!r} holds values of several kinds ({named}), expected classes of one kind: write each "
            'class as text, such as "1" in place of 1'
        )
    return set(values)


def some(names: Sequence[str]) -> str:
    """Return the first few names of classes, for an error."""
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def finite_number(label: Any) -> float:
    """Return a label as a number. A text, or a number that is not finite, raises a ValueError."""
    value = float(label)
    if isinstance(label, str) or not math.isfinite(value):
        raise ValueError
    return value


NUMBERS = LabelReader(
    {"num_labels": 1, "problem_type": "regression"},
    finite_number,
    "a finite number",
    "fill in the number, or drop the row",
)
"""The labels of a regression."""
