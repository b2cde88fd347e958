"""The labels of a file as a trained model counts them: classes, several labels, tags of words, and numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from datasets import Dataset

from hf_bayes.cli.data import check_split
from hf_bayes.cli.labels import LabelReader, classes_in, finite_number, read_labels, some
from hf_bayes.cli.row_places import place_of
from hf_bayes.posteriors.storage.json_types import as_list

_ADVICE = "drop such rows, or name the column of the labels"
_NUMBERS = "a .csv file reads 007 as 7, and 3 as 3.0 beside empty cells: write the names as texts in a .jsonl file, "


def classes_of(rows: Dataset, names: Sequence[str], *, what: str, label_column: str = "label") -> list[int]:
    """Return the class of each row among the classes of a trained model.

    Args:
        names: the names of the model's classes. Integers in the column are names, too, unless the column is a
            ``ClassLabel``.
        what: the name of the rows in errors.
        label_column: the column of the labels.
    Raises:
        ValueError: for a missing column, and a label that is no class of the model.
    """
    check_split(rows, label_column, what)
    expected = f"one of the {len(names)} classes of the model ({some(names)})"
    reader = LabelReader({}, _class_reader(rows, label_column, names), expected, _advice(rows, label_column, names))
    return read_labels(rows[label_column], reader, partial(place_of, what))


def label_vectors_of(
    rows: Dataset, names: Sequence[str], *, what: str, label_column: str = "label"
) -> list[list[float]]:
    """Return a vector for each row: 1 for each label of its list, and 0 for every other label of the model.

    Arguments and errors are as in ``classes_of``; a row with another value than a list is refused, too.
    """
    check_split(rows, label_column, what)
    read = _class_reader(rows, label_column, names)

    def vector(value: Any) -> list[float]:
        if not isinstance(value, list):
            raise TypeError
        chosen = {read(each) for each in value}
        return [float(number in chosen) for number in range(len(names))]

    expected = f"a list out of the {len(names)} labels of the model ({some(names)})"
    return read_labels(rows[label_column], LabelReader({}, vector, expected, _ADVICE), partial(place_of, what))


def tags_of(rows: Dataset, names: Sequence[str], *, what: str, label_column: str = "label") -> list[list[int]]:
    """Return the class of each word of each row, from a list of tags or from text with blanks between them.

    Arguments and errors are as in ``classes_of``.
    """
    check_split(rows, label_column, what)
    read = _class_reader(rows, label_column, names)
    expected = f"tags out of the {len(names)} classes of the model ({some(names)}), one for each word"
    reader = LabelReader({}, lambda value: [read(tag) for tag in words_of(value)], expected, _ADVICE)
    return read_labels(rows[label_column], reader, partial(place_of, what))


def words_of(value: Any) -> list[Any]:
    """Return the items of a list, or the words of a text with blanks between them.

    Raises:
        TypeError: for another value.
    """
    if isinstance(value, str):
        return value.split()
    if not isinstance(value, list):
        raise TypeError
    return value


def numbers_of(rows: Dataset, count: int, *, what: str, label_column: str = "label") -> list[list[float]]:
    """Return the numbers of each row, one for each output of a regression.

    Args:
        count: the number of outputs. One output takes a column of numbers, several take a column of lists.
        what, label_column: as in ``classes_of``.
    Raises:
        ValueError: for a missing column, and a label that is missing or not finite.
    """
    check_split(rows, label_column, what)

    def read(value: Any) -> list[float]:
        values = as_list(value)
        if len(values) != count:
            raise ValueError
        return [finite_number(each) for each in values]

    expected = "a finite number" if count == 1 else f"a list of {count} finite numbers"
    return read_labels(rows[label_column], LabelReader({}, read, expected, _ADVICE), partial(place_of, what))


def _advice(rows: Dataset, column: str, names: Sequence[str]) -> str:
    """Return the advice about a value that is no class."""
    numbers = getattr(rows.features[column], "dtype", "").startswith(("int", "float"))
    return (_NUMBERS if numbers and any(name.isdecimal() for name in names) else "") + _ADVICE


def _class_reader(rows: Dataset, column: str, names: Sequence[str]) -> Callable[[Any], int]:
    """Return the function from a value of the column, or of a list in it, to the class of the model."""
    _, given = classes_in(rows.features[column])
    index = {name: number for number, name in enumerate(names)}

    def read(value: Any) -> int:
        if value is None:
            raise LookupError
        return index[str(value if given is None else given[value])]

    return read
