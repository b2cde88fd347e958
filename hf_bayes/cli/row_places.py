"""The place of a row in words, for errors: the file and the line that an editor shows, where there is one."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from datasets import DatasetDict

_TABLES: dict[str, dict[str, Any]] = {".csv": {}, ".tsv": {"delimiter": "\t", "quoting": csv.QUOTE_NONE}}
"""The arguments of ``csv.reader`` for tables, which ``local_files`` reads in the same way."""
_LONGEST_CELL = 2**31 - 1
"""The largest number of characters in a cell: the largest C long on every platform. The default of csv is 131,072."""


@dataclass(frozen=True)
class Splits:
    """The splits "train" and "validation", whose rows may have been held out of one source.

    Attributes:
        rows: the data sets by name.
        sources: the name of a split -> its file, its glob, or words for another source.
        numbers: the name of a split -> the numbers in the source of its rows. Without an entry they are counted alike.
    """

    rows: DatasetDict
    sources: dict[str, str]
    numbers: dict[str, Sequence[int]] = field(default_factory=dict)

    def place(self, split: str, row: int) -> str:
        """Return words for a row of a split, see ``place_of``."""
        return place_of(self.sources[split], self.numbers[split][row] if split in self.numbers else row)


def place_of(source: str, row: int) -> str:
    """Return words for a row: its line in a .jsonl, .csv or .tsv file, or else its number, both counted from 1.

    Args:
        source: a file, or words for another source.
        row: the number of the row, from 0.
    """
    line = _line(Path(source), row) if Path(source).is_file() else None
    return f"row {row + 1} (counted from 1) of {source}" if line is None else f"line {line} of {source}"


def if_filled(place: str) -> str:
    """Return words to add to an error about an empty cell: in a table, the reader takes some words as empty.

    Args:
        place: the words of ``place_of`` for the row.
    """
    kind = next((suffix for suffix in _TABLES if suffix in place.lower()), None)
    if kind is None:
        return ""
    return (
        f". If the cell is filled: NA, null, None and the like also count as empty in a {kind} file; rename the class, "
        "change the text, or give the rows as .jsonl"
    )


def _line(file: Path, row: int) -> int | None:
    """Return the line in which a row begins; None for a file of another kind, or with fewer rows."""
    with file.open(encoding="utf-8", newline="") as lines:
        if file.suffix.lower() == ".jsonl":
            return next(islice((number for number, line in enumerate(lines, 1) if line.strip()), row, None), None)
        if (options := _TABLES.get(file.suffix.lower())) is not None:
            return _line_of_table(csv.reader(lines, **options), row)
    return None


def _line_of_table(reader: Any, row: int) -> int | None:
    """Return the line in which a row begins. A row may have line ends in quotes.

    Args:
        reader: the ``csv.reader`` of a file with a header.
    """
    limit = csv.field_size_limit(_LONGEST_CELL)  # a setting of the whole process
    try:
        before, found = 0, -1  # the header is no row
        for cells in reader:
            if cells and found == row:
                return before + 1
            before, found = reader.line_num, found + bool(cells)
    finally:
        csv.field_size_limit(limit)
    return None
