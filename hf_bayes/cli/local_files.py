"""Local files of rows or of text: their formats, the files that a pattern names, and the rows in them."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet
from datasets import ClassLabel, Dataset, Features, LargeList, List, Value, load_dataset
from datasets.exceptions import DatasetsError

_FORMATS = {".txt": "text", ".jsonl": "json", ".json": "json", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet"}
_OPTIONS: dict[str, dict[str, Any]] = {
    # A text file is one text: windows cross the ends of lines. A byte order mark before it is no text.
    ".txt": {"sample_by": "document", "encoding": "utf-8-sig"},
    # Quotes are characters of the text, as in the files of GLUE: one at the start of a cell would join rows.
    ".tsv": {"sep": "\t", "quoting": csv.QUOTE_NONE},
}
_SEPARATORS = {";": "semicolons", "\t": "tabs"}
_LONGEST_HEADER = 100_000
"""The characters of a header that are looked at; csv refuses a cell of 131,073."""


def suffix_of(file: str | Path) -> str:
    """Return the ending of a file's name in lower case."""
    return Path(file).suffix.lower()


def is_local(name: str) -> bool:
    """Return whether a name has the ending of a local file of text or rows.

    Any other name is a folder of ``save_to_disk`` or a data set of the Hub.

    Raises:
        ValueError: for an empty name, and a local file of another format.
    """
    if not name:
        raise ValueError("a file is expected, got an empty name: name one")
    if suffix_of(name) in _FORMATS:
        return True
    if Path(name).is_file():
        raise ValueError(f"{name} is a file of another format, expected one of {', '.join(_FORMATS)}")
    return False


def matching(pattern: str) -> list[str]:
    """Return the files that a path or a glob names.

    Raises:
        ValueError: for an empty name, and for a folder.
        FileNotFoundError: for a pattern that matches nothing.
    """
    is_local(pattern)
    path = Path(pattern)
    if path.is_dir():
        raise ValueError(f"{pattern} is a folder, expected a file or a glob: name the files in it, or export its rows")
    root = Path(path.anchor) if path.is_absolute() else Path()
    files = [str(path)] if path.is_file() else sorted(map(str, root.glob(str(path.relative_to(path.anchor)))))
    if not files:
        raise FileNotFoundError(f"no file matches {pattern!r}")
    return files


def load_files(files: Sequence[str]) -> Dataset:
    """Return the rows of files of one format, which have the same columns.

    Raises:
        ValueError: for a file that is empty or cannot be read, and for files of several formats.
    """
    suffix = check_formats(files)
    for file in files:
        if Path(file).stat().st_size == 0:
            raise ValueError(f"{file} is empty")
        if suffix == ".csv":
            _check_separator(Path(file))
        if suffix in (".jsonl", ".json"):
            _check_encoding(Path(file))
    kind = _FORMATS[suffix]
    try:
        if suffix == ".parquet":
            _check_classes(files)
        return load_dataset(kind, data_files={"train": list(files)}, **_OPTIONS.get(suffix, {}))["train"]
    except (DatasetsError, ValueError) as error:
        if len(files) > 1:
            _check_columns(files)
        raise ValueError(f"{', '.join(files)}{_reason(error, kind)}") from error


def is_saved(name: str) -> bool:
    """Return whether a name is a folder that ``save_to_disk`` of ``datasets`` has written."""
    return any((Path(name) / file).is_file() for file in ("state.json", "dataset_dict.json"))


def saved_splits(folder: str) -> dict[str, Path]:
    """Return the folder of each split that ``save_to_disk`` has written; a data set without splits is "train"."""
    root, index = Path(folder), Path(folder) / "dataset_dict.json"
    if not index.is_file():
        return {"train": root}
    return {name: root / name for name in json.loads(index.read_text(encoding="utf-8"))["splits"]}


def load_saved(folder: Path) -> Dataset:
    """Return the rows of a folder that ``save_to_disk`` has written for one split.

    ``load_from_disk`` would write the encoded rows into the folder, which belongs to the user and may be read-only. It
    would also restore a format, such as that of torch, whose values are no labels.

    Raises:
        ValueError: for a folder that has no rows or cannot be read.
    """
    try:
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        files = [str(folder / each["filename"]) for each in state["_data_files"]]
        return load_dataset("arrow", data_files={"train": files})["train"]
    except (DatasetsError, OSError, LookupError, ValueError) as error:
        raise ValueError(f"{folder}{_reason(error, 'a folder of save_to_disk')}") from error


def check_formats(files: Sequence[str]) -> str:
    """Return the ending of files of one format.

    Raises:
        ValueError: for files of several formats, or of another one.
    """
    suffixes = {suffix_of(file) for file in files}
    if len(suffixes) != 1 or not suffixes <= set(_FORMATS):
        raise ValueError(
            f"files must all be of one format out of {', '.join(_FORMATS)}, got {', '.join(sorted(suffixes))}"
        )
    return suffixes.pop()


def with_kinds_of(rows: Dataset, other: Dataset) -> Dataset:
    """Return rows whose columns have the kinds that ``other`` has for them, where all values can be converted.

    The kind of a column is found in its values. The class "7" is text in a file that also has the class "x", and an
    integer in a file that has numbers alone. Classes with names are converted by name: files number them differently.
    """
    for name, kind in other.features.items():
        if name in rows.features and rows.features[name] != kind:
            if isinstance(_inner(kind), ClassLabel) or _inner(kind) in (Value("string"), Value("large_string")):
                rows = _with_names(rows, name)
            try:
                rows = rows.cast(Features({**rows.features, name: kind}))
            except (ValueError, TypeError, NotImplementedError):
                continue  # the row with the other value is refused later, with its place
    return rows


def _inner(feature: Any) -> Any:
    """Return the kind of the values in a column, or of those in its lists."""
    return feature.feature if isinstance(feature, (List, LargeList)) else feature


def _with_names(rows: Dataset, column: str) -> Dataset:
    """Return rows with the names of the classes in place of their numbers, if the column has such names."""
    feature = rows.features[column]
    inner = _inner(feature)
    if not isinstance(inner, ClassLabel):
        return rows
    names = dict(enumerate(inner.names))  # -1 is an unknown label, which has no name

    def named(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        if inner is feature:
            return {column: [names.get(value) for value in batch[column]]}
        return {column: [row and [names.get(value) for value in row] for row in batch[column]]}

    text = Value("string") if inner is feature else List(Value("string"))
    return rows.map(named, batched=True, features=Features({**rows.features, column: text}))


def _check_classes(files: Sequence[str]) -> None:
    """Refuse files that number the classes of a column differently: the names of the first would be those of all."""
    first, *others = ((file, Features.from_arrow_schema(pyarrow.parquet.read_schema(file))) for file in files)
    for file, features in others:
        for column in first[1].keys() & features.keys():
            here, there = (_inner(kinds[column]) for kinds in (features, first[1]))
            if isinstance(here, ClassLabel) and isinstance(there, ClassLabel) and here.names != there.names:
                raise ValueError(
                    f"{column!r} has the classes {', '.join(here.names)} in {file}, and {', '.join(there.names)} in "
                    f"{first[0]}, expected one order"
                )


def _check_encoding(file: Path) -> None:
    """Refuse a file of JSON that is not in UTF-8: its texts could be loaded, and not be read."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                line.decode()
            except UnicodeDecodeError as error:
                raise ValueError(f"line {number} of {file} is no UTF-8 ({error}): save the file in UTF-8") from error


def _check_separator(file: Path) -> None:
    """Refuse a .csv file whose header has another separator than commas: its rows would have one column."""
    with file.open(encoding="utf-8-sig", errors="replace") as lines:
        header = lines.readline(_LONGEST_HEADER).strip()
    commas = next(csv.reader([header]), [])
    broken = any('"' in name for name in commas)  # by a comma in the quotes of a name
    for separator, words in _SEPARATORS.items():
        names = next(csv.reader([header], delimiter=separator), [])
        if len(names) > 1 and (len(commas) == 1 or (broken and not any('"' in name for name in names))):
            raise ValueError(
                f"{file} has {words} between its columns ({', '.join(names)}), expected commas: save it with commas, "
                "or with tabs under a name that ends in .tsv"
            )


def _reason(error: BaseException, kind: str) -> str:
    """Return why files cannot be read, to follow their names, and what to do."""
    if "corresponds to no data" in str(error):
        return ": a file has 0 rows, expected one or more"
    reason = " ".join(str(error.__cause__ or error).split())
    advice = ", and save it in UTF-8" if _is_of_encoding(error) else ""
    return f" cannot be read as {kind} ({reason}): correct the file{advice}"


def _is_of_encoding(error: BaseException | None) -> bool:
    """Return whether an error, or one of its causes, is about bytes that are not UTF-8."""
    if error is None or isinstance(error, UnicodeDecodeError):
        return error is not None
    return _is_of_encoding(error.__cause__ or error.__context__)


def _check_columns(files: Sequence[str]) -> None:
    """Refuse the first file that cannot be read alone, or that has other columns than the first of the files."""
    first, *others = ((file, load_files([file]).column_names) for file in files)
    for file, columns in others:
        if set(columns) != set(first[1]):
            raise ValueError(
                f"{file} has the columns {', '.join(columns)}, and {first[0]} has {', '.join(first[1])}: give all "
                "files of a split the same columns"
            )
