"""Rows of the data by number, for a pass over some of them, or over the data once more."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader
from tqdm import tqdm

from hf_bayes.core.rng import generator
from hf_bayes.objectives.curvature_pass import Batches


class DataAccess(NamedTuple):
    """Rows by number.

    Attributes:
        batches: numbers of training rows -> these rows, in this order, in batches.
        num_rows: the number of training rows.
        heldout: the same for held-out rows; None if there are none.
        num_heldout: the number of held-out rows.
        hide: True shows no progress bar; None shows one only on a terminal.
        varies: rows differ each time they are read, as with augmentation.
    """

    batches: Batches
    num_rows: int
    heldout: Batches | None = None
    num_heldout: int = 0
    hide: bool | None = None
    varies: bool = False

    def part(self, share: float, seed: int) -> DataAccess:
        """Return access to a random part of the training rows, always the same one for a seed."""
        if share >= 1:
            return self
        number = max(1, math.ceil(share * self.num_rows))
        order = _some(self.num_rows, number, seed, "part of the rows")
        return self._replace(batches=lambda rows: self.batches([order[row] for row in rows]), num_rows=number)

    def with_heldout(self, heldout: Batches, num_rows: int, *, most: int | None, seed: int) -> DataAccess:
        """Return access to held-out rows, too: to all of them, or to a random part, always the same one for a seed.

        Args:
            heldout: numbers of held-out rows -> these rows, in this order, in batches.
            num_rows: the number of these rows.
            most: the largest number of them to read; None: all.
        """
        if most is None or num_rows <= most:
            return self._replace(heldout=heldout, num_heldout=num_rows)
        order = _some(num_rows, most, seed, "part of the held-out rows")
        return self._replace(heldout=lambda rows: heldout([order[row] for row in rows]), num_heldout=most)


def row_batches(
    dataset: Any, rows: Sequence[int], *, collate: Callable[..., Any], batch_size: int, prepare: Callable[[Any], Any],
    progress: str | None = None,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Yield these rows of a data set, in this order, in batches.

    Args:
        rows: the numbers of the rows.
        collate: rows -> a batch.
        prepare: a function that moves a batch to the device.
        progress: the title of a progress bar; None shows none.
    """
    loader: DataLoader[Any] = DataLoader(dataset, batch_size=batch_size, sampler=rows, collate_fn=collate)
    for batch in tqdm(loader, desc=progress, disable=progress is None, leave=False):
        yield prepare(batch)


def _some(num_rows: int, number: int, seed: int, purpose: str) -> list[int]:
    """Return the numbers of ``number`` different rows, in random order."""
    order: list[int] = torch.randperm(num_rows, generator=generator(seed, purpose))[:number].tolist()
    return order
