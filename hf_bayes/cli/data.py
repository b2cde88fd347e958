"""Data sets for the scripts, from the Hub or from local files: splits, episodes, rows and checks of columns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from datasets import Dataset, DatasetDict, load_dataset

from hf_bayes.cli.hold_out import cut_text, hold_out
from hf_bayes.cli.local_files import (
    check_formats,
    is_local,
    is_saved,
    load_files,
    load_saved,
    matching,
    saved_splits,
    suffix_of,
    with_kinds_of,
)
from hf_bayes.cli.parsing import read_text
from hf_bayes.cli.row_places import Splits, if_filled, place_of


def load_splits(
    dataset: str,
    *,
    config: str | None = None,
    validation_file: str | None = None,
    validation_fraction: float = 0.1,
    text_column: str = "text",
    label_column: str | None = None,
    seed: int = 0,
    revision: str | None = None,
) -> Splits:
    """Return the splits "train" and "validation" of local files or of a data set of the Hub.

    A missing validation split is taken from the training data: random rows, or the last part if the training data is
    one text (posteriors paper, app. E). A test split is never used, so that it stays untouched.

    Args:
        dataset: a .txt (one text per file), .jsonl, .json, .csv, .tsv or .parquet file, a glob of such files, a folder
            of ``save_to_disk``, or a Hub data set.
        config: the configuration of a Hub data set.
        validation_file: a local file or glob, only together with local training files.
        validation_fraction: share of the training rows to hold out if there is no validation split. 0 returns no
            validation split.
        text_column: the column that holds the text.
        label_column: the column of the classes, if rows have classes. Random rows are then held out so that the
            training split keeps a row of each class. A ``ClassLabel`` names its classes, so its rows stay random.
        seed: the seed of the random split.
        revision: the revision of a Hub data set.
    Raises:
        ValueError: for a file of unknown format, an empty split, a missing column, a fraction outside [0, 1), and an
            argument of another kind of data set.
        FileNotFoundError: for a pattern that matches nothing.
    """
    if not 0 <= validation_fraction < 1:
        raise ValueError(
            f"validation_fraction must be at least 0, which holds no row out, and below 1, got {validation_fraction}: "
            "give the share of the training rows to evaluate on, such as 0.1"
        )
    sources = {name: f"the split {name!r} of {dataset!r}" for name in ("train", "validation")}
    if is_local(dataset) or is_saved(dataset):
        for argument, value in (("dataset_config", config), ("revision", revision)):
            if value is not None:
                raise ValueError(f"{argument}={value!r} is for a data set of the Hub, got {dataset!r}: leave it out")
    if is_local(dataset):
        splits = _load_local(dataset, validation_file)
        sources = {"train": dataset, "validation": validation_file or dataset}
    elif validation_file is not None:
        raise ValueError(
            f"validation_file={validation_file!r} goes with a local training file, got the "
            f"{'folder' if is_saved(dataset) else 'Hub data set'} {dataset!r}: "
            "leave it out, or give files for both"
        )
    elif is_saved(dataset):
        splits = _load_folder(dataset)
    else:
        splits = load_dataset(dataset, config, revision=revision)
    _check_train(splits, dataset)
    for name in ("train", "validation"):
        if name in splits:
            what = f"the split {name!r} of {dataset!r}"
            check_texts(splits[name], text_column, what, place=partial(place_of, sources[name]))
    found = Splits(DatasetDict(train=splits["train"]), sources)
    if "validation" in splits:
        found.rows["validation"] = splits["validation"]
    elif validation_fraction > 0:
        found.sources["validation"] = sources["train"]
        hold_out(found, validation_fraction, text_column=text_column, label_column=label_column, seed=seed)
    return found


def _load_local(train: str, validation: str | None) -> DatasetDict:
    """Return the splits of local files. Each is read alone: the validation rows may have more columns."""
    files = [matching(name) for name in (train, validation) if name is not None]
    check_formats([file for group in files for file in group])
    splits = DatasetDict(train=load_files(files[0]))
    for group in files[1:]:
        splits["validation"] = with_kinds_of(load_files(group), splits["train"])
    return splits


def _load_folder(folder: str) -> DatasetDict:
    """Return the splits "train" and "validation" (if there is one) of a folder of ``save_to_disk``."""
    folders = saved_splits(folder)
    _check_train(folders, folder)
    splits = DatasetDict(train=load_saved(folders["train"]))
    if "validation" in folders:
        splits["validation"] = with_kinds_of(load_saved(folders["validation"]), splits["train"])
    return splits


def _check_train(splits: Iterable[str], dataset: str) -> None:
    if "train" not in splits:
        raise ValueError(f"{dataset!r} has no split 'train', only {', '.join(splits)}")


def load_episode(source: str, *, held_out: float = 0.15, text_column: str = "text") -> tuple[Dataset, Dataset]:
    """Return the beginning of a text for training and its end for testing.

    The posteriors paper (app. E) tests on the last 15 % of a book.

    Args:
        source: a file or glob as in ``load_splits``, or ``NAME[/CONFIG][:SPLIT]`` of the Hub: a name with two slashes
            has a configuration, and the split is "train" by default. Rows are joined by blank lines.
        held_out: share of the text to test on.
        text_column: the column that holds the text.
    Raises:
        ValueError, FileNotFoundError: as ``load_splits``.
    """
    if not 0 < held_out < 1:
        raise ValueError(
            f"held_out must lie strictly between 0 and 1, got {held_out}: each episode is tested on its end, so give "
            "the share of it, such as 0.15"
        )
    if is_local(source) or is_saved(source):  # the folder is refused
        rows = load_files(matching(source))
    else:
        name, _, split = source.partition(":")
        *owner, config = name.split("/") if name.count("/") == 2 else (name, None)
        rows = load_dataset("/".join(owner), config, split=split or "train")
    check_texts(rows, text_column, repr(source), place=partial(place_of, source))
    parts = cut_text("\n\n".join(rows[text_column]), 1 - held_out, column=text_column)
    if parts is None:
        raise ValueError(f"{source!r} is too short to hold out {held_out} of it as its end: give more text")
    return parts


def load_rows(file: str) -> Dataset:
    """Return the rows of a .jsonl, .json, .csv, .tsv or .parquet file, or of a glob of such files.

    Raises:
        ValueError: for a file of another format, or an empty file.
        FileNotFoundError: for a pattern that matches nothing.
    """
    if suffix_of(file) == ".txt":
        raise ValueError(f"{file} is one text, expected rows: give a .jsonl, .csv or .parquet file with a row for each")
    return load_files(matching(file))


def texts_in(file: str, column: str = "text") -> list[str]:
    """Return the texts of a file or glob: a .txt file is one text, and any other has a text in each row.

    Args:
        column: the column of the texts in a .jsonl, .json, .csv, .tsv or .parquet file.
    Raises:
        ValueError: for a file of another format or encoding, an empty file, and as ``check_texts``.
        FileNotFoundError: for a pattern that matches nothing.
    """
    files = matching(file)
    if all(suffix_of(each) == ".txt" for each in files):
        return [read_text(each) for each in files]
    rows = load_files(files)
    check_texts(rows, column, file)
    return list(rows[column])


def named_files(test: str, pairs: Sequence[str]) -> dict[str, str]:
    """Return {name: file}, "test" first, from ``name=file`` for each other file.

    Args:
        test: the file of ``--test``.
        pairs: the values of ``--ood``.
    Raises:
        ValueError: for another form, and for a name that occurs twice: the figures of one file would be lost.
    """
    files = {"test": test}
    for pair in pairs:
        name, sign, path = pair.partition("=")
        if not (name and sign and path):
            raise ValueError(
                f"--ood takes name=file for each set, such as code=code.txt, got {pair!r}: give the file a name"
            )
        if name == "test":
            raise ValueError(f'--ood got {pair!r}, and "test" is the file of --test ({test}): choose another name')
        if name in files:
            raise ValueError(f"--ood got the name {name!r} for {files[name]} and for {path}: give each set its own")
        files[name] = path
    return files


def check_split(split: Dataset, column: str, what: str) -> None:
    """Check that a split has rows and the column. ``what`` names the split in the error.

    Raises:
        ValueError: if it has no rows or lacks the column.
    """
    if column not in split.column_names:
        raise ValueError(f"{what} has no column {column!r}, only {', '.join(split.column_names)}: name one of them")
    if len(split) == 0:
        raise ValueError(f"{what} has 0 rows")


def check_texts(split: Dataset, column: str, what: str, *, place: Callable[[int], str] | None = None) -> None:
    """Check that a split has rows, and text in every row of the column.

    Args:
        what: the name of the split in errors.
        place: a function from the number of a row to words for it, by default ``place_of`` in a file of that name.
    Raises:
        ValueError: as ``check_split``, or naming the row without text.
    """
    check_split(split, column, what)
    kind = getattr(split.features[column], "dtype", type(split.features[column]).__name__)
    if kind not in ("string", "large_string"):
        raise ValueError(f"{what}: the column {column!r} holds {kind}, expected text: name another, or make it text")
    if split.data.column(column).null_count:  # counted over the whole table, and the split may be a part of it
        for row, text in enumerate(split[column]):
            if text is None:
                where = place_of(what, row) if place is None else place(row)
                raise ValueError(
                    f"{where}: {column!r} holds nothing (null), expected text: fill it, or leave it out"
                    + if_filled(where)
                )
