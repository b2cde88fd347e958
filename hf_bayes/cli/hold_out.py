"""Rows that are held out of the training data: a random share of the rows, or the end of one text."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from datasets import ClassLabel, Dataset

from hf_bayes.cli.row_places import Splits


def hold_out(splits: Splits, fraction: float, *, text_column: str, label_column: str | None, seed: int) -> None:
    """Move a part of the training data to the split "validation".

    Args:
        fraction: the share of the rows, or of the text.
        text_column: the column of the text.
        label_column: the column of the classes, see ``keep_classes``; None for rows without classes. The rows of
            a ``ClassLabel`` stay random: its classes are known without a row of each.
        seed: the seed of the random rows.
    Raises:
        ValueError: for one text that is too short, and if each row is the only one of its class.
    """
    train = splits.rows["train"]
    if len(train) == 1:
        cut = cut_text(train[0][text_column], 1 - fraction, column=text_column)
        if cut is None:
            raise ValueError("the training data is one text, too short to hold out a part: give a validation file")
        splits.rows["train"], splits.rows["validation"] = cut
        return
    numbers = Dataset.from_dict({"number": range(len(train))})
    parts = numbers.train_test_split(test_size=math.ceil(fraction * len(train)), seed=seed)
    kept, held = list(parts["train"]["number"]), list(parts["test"]["number"])
    if label_column in train.column_names:
        keep_classes(kept, held, _classes_in(train[label_column], train.features[label_column]))
    for name, rows in (("train", kept), ("validation", held)):
        splits.numbers[name] = rows
        splits.rows[name] = train.select(rows)


def keep_classes(kept: list[int], held: list[int], classes: Sequence[set[str]]) -> None:
    """Exchange rows until the rows that are kept for training have each class.

    A held-out row of a class that no kept row has changes places with the last kept row whose classes all have other
    kept rows. If there is no such row, it moves alone. Nothing changes if the kept rows have each class already.

    Args:
        kept: the numbers of the rows for training.
        held: the numbers of the rows that are held out.
        classes: the classes of each row: one, or several of a multi-label classifier.
    Raises:
        ValueError: if no row remains held out.
    """
    counts = Counter(each for row in kept for each in classes[row])
    places = iter(range(len(kept) - 1, -1, -1))
    for place, row in enumerate(list(held)):
        if all(counts[each] for each in classes[row]):
            continue
        counts.update(classes[row])
        spare = next((own for own in places if all(counts[each] > 1 for each in classes[kept[own]])), None)
        if spare is None:
            kept.append(row)
            held[place] = -1
        else:
            counts.subtract(classes[kept[spare]])
            held[place], kept[spare] = kept[spare], row
    held[:] = [row for row in held if row >= 0]
    if not held:
        raise ValueError(
            f"no row can be held out, because each of the {len(kept)} rows is the only one of its class: give a "
            "validation file, more rows of each class, or a validation_fraction of 0, which holds nothing out. If the "
            "labels are not classes, name another column, or set regression"
        )


def _classes_in(labels: Sequence[Any], kind: Any) -> list[set[str]]:
    """Return the classes of each row that only the rows name: none of a ``ClassLabel``, which has their names.

    Args:
        labels: the label of each row.
        kind: the feature of their column.
    """
    if isinstance(getattr(kind, "feature", kind), ClassLabel):
        return [set() for _ in labels]
    return [_classes_of(label) for label in labels]


def _classes_of(label: Any) -> set[str]:
    """Return the classes of a row as texts: texts, integers or booleans. Other values are refused or predicted."""
    values = label if isinstance(label, list) else [label]
    return {repr(value) for value in values if isinstance(value, (str, int))}


def cut_text(text: str, fraction: float, *, column: str) -> tuple[Dataset, Dataset] | None:
    """Cut a text in two at the last line end (or blank, or character) before ``fraction`` of its length.

    Returns:
        A row of each part, in the column ``column``. None if one part would be blank.
    """
    place = int(len(text) * fraction)
    for end in ("\n", " "):
        found = text.rfind(end, place // 2, place)
        if found > 0:
            place = found + 1
            break
    parts = text[:place], text[place:]
    if not all(part.strip() for part in parts):
        return None
    head, tail = (Dataset.from_dict({column: [part]}) for part in parts)
    return head, tail
