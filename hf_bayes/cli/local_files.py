"""Local files of rows or of text: their formats, the files that a pattern names, and the rows in them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset, Features, load_dataset
from datasets.exceptions import DatasetsError

_FORMATS = {".txt": "text", ".jsonl": "json", ".json": "json", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet"}
_OPTIONS: dict[str, dict[str, Any]] = {
    # A text file is one text: windows cross the ends of lines. A byte order mark before it is no text.
    ".txt": {"sample_by": "document", "encoding": "utf-8-sig"},
    ".tsv": {"sep": "\t"},
}
_SEPARATORS = {";": "semicolons", "\t": "tabs"}


def suffix_of(file: str | Path) -> str:
    """Return the ending of a file's name in lower case."""
    return Path(file).suffix.lower()


def is_local(name: str) -> bool:
    """Return whether a name has the ending of a local file of text or rows. Other names are looked for on the Hub.

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
        ValueError: for an empty name.
        FileNotFoundError: for a pattern that matches nothing.
    """
    is_local(pattern)
    path = Path(pattern)
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
    kind = _FORMATS[suffix]
    try:
        return load_dataset(kind, data_files={"train": list(files)}, **_OPTIONS.get(suffix, {}))["train"]
    except (DatasetsError, ValueError) as error:
        if len(files) > 1:
            _check_columns(files)
        raise ValueError(f"{', '.join(files)}{_reason(error, kind)}") from error


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
    integer in a file that has numbers alone.
    """
    for name, kind in other.features.items():
        if name in rows.features and rows.features[name] != kind:
            try:
                rows = rows.cast(Features({**rows.features, name: kind}))
            except (ValueError, TypeError, NotImplementedError):
                continue  # the row with the other value is refused later, with its place
    return rows


def _check_separator(file: Path) -> None:
    """Refuse a .csv file whose header has another separator than commas: its rows would have one column."""
    with file.open(encoding="utf-8-sig", errors="replace") as lines:
        header = lines.readline().strip()
    for separator, words in _SEPARATORS.items():
        if separator in header and "," not in header:
            names = ", ".join(header.split(separator))
            raise ValueError(
                f"{file} has {words} between its columns ({names}), expected commas: save it with commas, or with tabs "
                "under a name that ends in .tsv"
            )


def _reason(error: BaseException, kind: str) -> str:
    """Return why files cannot be read, to follow their names, and what to do."""
    if "corresponds to no data" in str(error):
        return ": a file has 0 rows, expected one or more"
    reason = str(error.__cause__ or error).strip().splitlines()[0]
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
