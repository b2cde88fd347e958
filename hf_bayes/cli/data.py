"""Data sets for the training scripts: Hub or local files, and token windows for language models."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

from datasets import Dataset, DatasetDict, load_dataset

from hf_bayes.uncertainty.likelihoods import IGNORE

_FORMATS = {".txt": "text", ".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}


def load_splits(
    dataset: str,
    *,
    config: str | None = None,
    validation_file: str | None = None,
    validation_fraction: float = 0.1,
    text_column: str = "text",
    seed: int = 0,
    revision: str | None = None,
) -> DatasetDict:
    """The splits "train" and "validation" of local files or of a data set of the Hub.

    A missing validation split is taken from the training data: random rows, or, where the training data is one text,
    its last part (posteriors paper, app. E). A test split is never touched: it would no longer be one.

    Args:
        dataset: a .txt (one text a file), .jsonl, .json, .csv or .parquet file, a glob of such, or a Hub data set.
        config: which configuration of a Hub data set.
        validation_file: a local file or glob; only beside local training files.
        validation_fraction: share of the training rows to hold out if there is no validation split; with 0 there is
            none in the answer, either.
        text_column: the column that holds the text.
        seed: of the random split.
        revision: of a Hub data set.
    Raises:
        ValueError: for a file of unknown format, an empty split, a missing column, a fraction outside [0, 1).
        FileNotFoundError: for a pattern that matches nothing.
    """
    if not 0 <= validation_fraction < 1:
        raise ValueError(
            f"validation_fraction must be at least 0, which holds no row out, and below 1, got {validation_fraction}: "
            "give the share of the training rows to evaluate on, such as 0.1"
        )
    if Path(dataset).suffix in _FORMATS:
        files = {"train": _matching(dataset)}
        if validation_file is not None:
            files["validation"] = _matching(validation_file)
        splits = _load_files(files)
    elif validation_file is not None:
        raise ValueError(
            f"validation_file={validation_file!r} goes with a local training file, got the Hub data set {dataset!r}: "
            "leave it out, or give files for both"
        )
    else:
        splits = load_dataset(dataset, config, revision=revision)
    if "train" not in splits:
        raise ValueError(f"{dataset!r} has no split 'train', only {', '.join(splits)}")
    for name in ("train", "validation"):
        if name in splits:
            check_texts(splits[name], text_column, f"the split {name!r} of {dataset!r}")
    if "validation" not in splits and validation_fraction == 0:
        return DatasetDict(train=splits["train"])
    if "validation" not in splits:
        train, held_out = _hold_out(splits["train"], validation_fraction, text_column, seed)
        return DatasetDict(train=train, validation=held_out)
    return DatasetDict(train=splits["train"], validation=splits["validation"])


def load_episode(source: str, *, held_out: float = 0.15, text_column: str = "text") -> tuple[Dataset, Dataset]:
    """One text to learn and its end to be tested on (posteriors paper, app. E: the last 15 % of a book).

    Args:
        source: a file or glob as of ``load_splits``, or ``NAME[/CONFIG][:SPLIT]`` of the Hub: a name with two slashes
            has a configuration, and the split is "train" by default. Rows are joined by blank lines.
        held_out: share of the text.
        text_column: the column that holds it.
    Raises:
        ValueError, FileNotFoundError: as ``load_splits``.
    """
    if not 0 < held_out < 1:
        raise ValueError(
            f"held_out must lie strictly between 0 and 1, got {held_out}: each episode is tested on its end, so give "
            "the share of it, such as 0.15"
        )
    if Path(source).suffix in _FORMATS:
        rows = _load_files({"train": _matching(source)})["train"]
    else:
        name, _, split = source.partition(":")
        *owner, config = name.split("/") if name.count("/") == 2 else (name, None)
        rows = load_dataset("/".join(owner), config, split=split or "train")
    check_texts(rows, text_column, repr(source))
    parts = _cut_text("\n\n".join(rows[text_column]), 1 - held_out)
    if parts is None:
        raise ValueError(f"{source!r} is too short to hold out {held_out} of it as its end: give more text")
    return _as_rows(parts, text_column)


class Window(NamedTuple):
    """Tokens [start, end) of a text, of which [loss_start, end) count in the loss."""

    start: int
    end: int
    loss_start: int


def window_spans(
    num_tokens: int, *, length: int, overlap: int = 0, loss_tokens: int | None = None, score_start: bool = True
) -> list[Window]:
    """Where windows lie over a text and which tokens count (posteriors paper, app. F: 300, 100 and 50).

    A window starts every ``step = length - overlap`` tokens and its last ``loss_tokens`` tokens count, so each of them
    has at least ``length - loss_tokens`` tokens of context. With ``loss_tokens = step``, the default, every token
    counts exactly once. The last window reaches back instead of being short, and counts only tokens that no window
    before it holds.

    Args:
        num_tokens: of the text.
        length: of a window; a shorter text is one shorter window.
        overlap: tokens that two neighbours share.
        loss_tokens: at most ``step``, or tokens would count twice.
        score_start: the first window of a text counts all its tokens, the first without any context; False leaves the
            first ``length - loss_tokens`` without loss, as the paper does.
    Raises:
        ValueError: if the three lengths do not fit together.
    """
    step = length - overlap
    if length < 2 or not 0 <= overlap < length:
        raise ValueError(f"windows need length >= 2 and 0 <= overlap < length, got length={length}, overlap={overlap}")
    loss_tokens = step if loss_tokens is None else loss_tokens
    if not 1 <= loss_tokens <= step:
        raise ValueError(
            f"loss_tokens must be between 1 and length - overlap = {step}, or tokens would count more than once; got "
            f"{loss_tokens}: lower it, or lower overlap ({overlap})"
        )
    windows: list[Window] = []
    covered = 0  # tokens that lie in some window so far
    while covered < num_tokens:
        end = min(covered + (step if windows else length), num_tokens)
        loss_start = max(end - loss_tokens, covered)
        if not windows and score_start:
            loss_start = 0
        windows.append(Window(max(0, end - length), end, loss_start))
        covered = end
    return windows


def token_windows(
    texts: Dataset,
    tokenizer: Any,
    *,
    length: int,
    overlap: int = 0,
    loss_tokens: int | None = None,
    score_start: bool = True,
    text_column: str = "text",
    join: bool = False,
) -> Dataset:
    """Rows ``input_ids``, ``attention_mask``, ``labels`` for a causal LM; -100 where a token does not count.

    Labels are not shifted: the model does that, which drops the first token of a window. Windows without any token that
    counts (after the shift) are left out.

    Args:
        texts: rows of text.
        tokenizer: any tokenizer of transformers; its special tokens open each text.
        length: see ``window_spans``, as are overlap, loss_tokens and score_start.
        text_column: the column that holds the text.
        join: treat all rows as one text, with the end-of-sequence token between them: for many short rows.
    Raises:
        ValueError: if the lengths do not fit together, no text holds two tokens, or ``join`` lacks a separator.
    """
    lengths: dict[str, Any] = {
        "length": length,
        "overlap": overlap,
        "loss_tokens": loss_tokens,
        "score_start": score_start,
    }
    window_spans(0, **lengths)
    separator = [tokenizer.eos_token_id] if join else []
    if separator == [None]:
        raise ValueError("join=True needs an end-of-sequence token between texts, the tokenizer has none: join=False")

    def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        # verbose=False: the warning that a text is longer than the model's context would be about the uncut text.
        return {"input_ids": tokenizer(batch[text_column], verbose=False)["input_ids"]}

    def cut(batch: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
        rows: dict[str, list[list[int]]] = {"input_ids": [], "attention_mask": [], "labels": []}
        encoded = batch["input_ids"]
        for ids in [[token for row in encoded for token in [*row, *separator]]] if join else encoded:
            for start, end, loss_start in window_spans(len(ids), **lengths):
                labels = [IGNORE] * (loss_start - start) + ids[loss_start:end]
                labels[0] = IGNORE  # nothing precedes it, the shift drops it: N counts what is left
                if any(label != IGNORE for label in labels):
                    rows["input_ids"].append(ids[start:end])
                    rows["attention_mask"].append([1] * (end - start))
                    rows["labels"].append(labels)
        return rows

    encoded = texts.map(encode, batched=True, remove_columns=texts.column_names)
    # One batch of all rows where they are joined: a text has one beginning.
    windows = encoded.map(cut, batched=True, batch_size=None if join else 1000, remove_columns=encoded.column_names)
    if len(windows) == 0:
        raise ValueError(f"no window with a token to predict in {len(texts)} rows of {text_column!r}: are they empty?")
    return windows


def _matching(pattern: str) -> list[str]:
    path = Path(pattern)
    root = Path(path.anchor) if path.is_absolute() else Path()
    files = [str(path)] if path.is_file() else sorted(map(str, root.glob(str(path.relative_to(path.anchor)))))
    if not files:
        raise FileNotFoundError(f"no file matches {pattern!r}")
    return files


def _load_files(files: dict[str, list[str]]) -> DatasetDict:
    suffixes = {Path(file).suffix for group in files.values() for file in group}
    if len(suffixes) != 1 or not suffixes <= set(_FORMATS):
        raise ValueError(
            f"files must all be of one format out of {', '.join(_FORMATS)}, got {', '.join(sorted(suffixes))}"
        )
    kind = _FORMATS[suffixes.pop()]
    for file in (file for group in files.values() for file in group):
        if Path(file).stat().st_size == 0:
            raise ValueError(f"{file} is empty")
    # A text file is one text: windows run over its line ends.
    return load_dataset(kind, data_files=files, **({"sample_by": "document"} if kind == "text" else {}))


def check_split(split: Dataset, column: str, what: str) -> None:
    """Raise a ValueError for a split without rows or without the column; ``what`` names the split."""
    if column not in split.column_names:
        raise ValueError(f"{what} has no column {column!r}, only {', '.join(split.column_names)}: name one of them")
    if len(split) == 0:
        raise ValueError(f"{what} has 0 rows")


def check_texts(split: Dataset, column: str, what: str) -> None:
    """As ``check_split``, and for a column or a row that holds no text."""
    check_split(split, column, what)
    kind = getattr(split.features[column], "dtype", type(split.features[column]).__name__)
    if kind not in ("string", "large_string"):
        raise ValueError(f"{what}: the column {column!r} holds {kind}, expected text: name another, or make it text")
    if split.data.column(column).null_count:  # of the whole table, of which the split may be a part
        for row, text in enumerate(split[column]):
            if text is None:
                raise ValueError(
                    f"{what}: row {row} of {column!r} holds nothing (null), expected text: fill it, or leave it out"
                )


def check_window(length: int, config: Any) -> None:
    """Raise a ValueError for a window that is longer than the longest context of the model with this ``config``."""
    longest = getattr(config, "max_position_embeddings", None)  # models whose positions are relative (Bloom) have none
    if longest is not None and length > longest:
        raise ValueError(
            f"window={length} is longer than the model's longest context, {longest} tokens: lower window, or, of a "
            "model that can go further, raise max_position_embeddings by config_overrides"
        )


def _hold_out(train: Dataset, fraction: float, text_column: str, seed: int) -> tuple[Dataset, Dataset]:
    if len(train) > 1:
        parts = train.train_test_split(test_size=math.ceil(fraction * len(train)), seed=seed)
        return parts["train"], parts["test"]
    parts = _cut_text(train[0][text_column], 1 - fraction)
    if parts is None:
        raise ValueError("the training data is one text, too short to hold out a part: give a validation file")
    return _as_rows(parts, text_column)


def _as_rows(parts: tuple[str, str], column: str) -> tuple[Dataset, Dataset]:
    head, tail = (Dataset.from_dict({column: [part]}) for part in parts)
    return head, tail


def _cut_text(text: str, fraction: float) -> tuple[str, str] | None:
    """In two at the line end (or the blank, or the character) nearest before ``fraction`` of its length.

    None if one of them would be blank.
    """
    place = int(len(text) * fraction)
    for end in ("\n", " "):
        found = text.rfind(end, place // 2, place)
        if found > 0:
            place = found + 1
            break
    head, tail = text[:place], text[place:]
    return (head, tail) if head.strip() and tail.strip() else None
