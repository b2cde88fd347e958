"""A fingerprint of training data, by which a checkpoint recognises the rows it was made with.

It hashes what the model is given: rows as the collator presents them, each one on its own. Of a data set with a length
these are ``SAMPLED_ROWS`` rows spread evenly over it, the first and the last among them; of a stream, its first
``STREAM_ROWS`` rows. A change in a row between two sampled ones can go unnoticed, unless it changes a length: counts of
rows and of likelihood terms, which are compared beside the fingerprint, come from all rows.

Taking a fingerprint consumes no random numbers. The global generators of torch, numpy and Python are seeded for it and
put back; so is what the data set and the collator hold: generators among their attributes, and the attributes
themselves. A collator may be random all the same. Every row is presented twice from the same seeds, and of a value that
differs (a generator out of reach drew it) only the name counts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_bayes.core.hashing import fingerprint_json, fingerprint_tensors
from hf_bayes.core.tensors import tensors_in
from hf_bayes.training.data.generators import seed_all, undisturbed

SAMPLED_ROWS = 64
STREAM_ROWS = 16
TOGETHER = 4
"""Rows that are collated together, to see whether the collator packs them into fewer."""
DIGITS = 16
"""Hexadecimal digits kept of a hash: 64 bits."""


def describe_rows(dataset: Any, collate: Callable[..., Any], *, seed: int) -> dict[str, Any]:
    """Return the JSON-ready identity of a data set with a length.

    Args:
        dataset: rows by number, without the columns that the model does not take.
        collate: the collator.
        seed: the seed of the global generators, while rows are presented.
    Returns:
        ``columns``, the names of what the model is given; ``fingerprint``; and ``packs``, whether the collator makes
        other numbers of rows than it is given.
    """
    numbers = torch.linspace(0, len(dataset) - 1, SAMPLED_ROWS, dtype=torch.float64).long().unique().tolist()
    with undisturbed(dataset, collate):
        return _describe(lambda: ((number, dataset[number]) for number in numbers), collate, seed)


def describe_stream(
    stream: Iterable[Any], collate: Callable[..., Any], *, seed: int, count: int = STREAM_ROWS
) -> dict[str, Any]:
    """Return the JSON-ready identity of a stream: as ``describe_rows``, from its first ``count`` rows.

    Rows that come later are not compared, and neither is their number, which is not known. A stream that begins in
    another way whenever it is iterated over is compared by its columns alone.
    """
    with undisturbed(stream, collate):
        return _describe(lambda: enumerate(itertools.islice(stream, count)), collate, seed)


def fingerprint_rows(dataset: Any, collate: Callable[..., Any], *, seed: int) -> str:
    """Return the fingerprint alone."""
    return str(describe_rows(dataset, collate, seed=seed)["fingerprint"])


def _describe(rows: Callable[[], Iterable[tuple[int, Any]]], collate: Callable[..., Any], seed: int) -> dict[str, Any]:
    (first, _), (second, together) = (_present(rows(), collate, seed) for _ in range(2))
    agreed = {name: digest if second.get(name) == digest else None for name, digest in first.items()}
    columns = sorted({name.split("/", 1)[1] for name in first})
    seed_all(seed)
    packs = bool(together) and _num_rows(collate(together)) not in (None, len(together))
    return {"columns": columns, "fingerprint": fingerprint_json(agreed)[:DIGITS], "packs": packs}


def _present(
    rows: Iterable[tuple[int, Any]], collate: Callable[..., Any], seed: int
) -> tuple[dict[str, str], list[Any]]:
    """Return {"number/name": digest} of each row as the collator presents it alone, and the first rows themselves."""
    seed_all(seed)
    found: dict[str, str] = {}
    kept: list[Any] = []
    for number, row in rows:
        kept += [row] if len(kept) < TOGETHER else []
        for name, value in collate([row]).items():
            if (digest := _digest(value)) is not None:
                found[f"{number}/{name}"] = digest
    return found, kept


def _digest(value: Any) -> str | None:
    """Return the digest of a value that rows of data have; None for any other value."""
    match value:
        case Tensor():
            return fingerprint_tensors([("value", value)])
        case np.ndarray():
            return fingerprint_json([str(value.dtype), value.tolist()])
        case int() | float() | str() | list() | tuple():
            return fingerprint_json(value)
    return None


def _num_rows(batch: Mapping[str, Any]) -> int | None:
    tensors = tensors_in(batch)
    first = tensors.get("labels", next(iter(tensors.values()), None))
    return len(first) if first is not None and first.ndim else None
