"""A check for rows that differ each time they are read, as with augmentation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from hf_bayes.core.tensors import tensors_in
from hf_bayes.training.data.generators import seeded

ROWS_COMPARED = 8
TIMES_COMPARED = 4
"""Rows that are read, and the readings of each."""


def rows_vary(dataset: Any, collate: Callable[..., Any], *, seed: int) -> bool:
    """Return whether rows of a data set differ each time they are read.

    A row that changes half of the time is the same in all of n readings with probability 2^(1 - n).

    Args:
        seed: the seed of the global generators, while rows are read.
    """
    rows = range(0, len(dataset), -(-len(dataset) // ROWS_COMPARED))
    with seeded(seed, dataset, collate):
        return any(_differ(collate([dataset[row]]) for _ in range(TIMES_COMPARED)) for row in rows)


def _differ(readings: Iterator[dict[str, Any]]) -> bool:
    first = tensors_in(next(readings))
    return any(not torch.equal(value, other[name]) for other in readings for name, value in first.items())
