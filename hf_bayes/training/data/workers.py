"""Random numbers of the workers of a data loader: those of a batch follow from its number in the run.

A worker of torch has one random sequence for all batches of an epoch. A resumed run skips batches without reading them,
so that a data set or collator that draws would continue at another place of the sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import Dataset
from transformers import set_seed

from hf_bayes.core.rng import seed_of
from hf_bayes.objectives.batches import ChainBatches, FullPasses


class NumberedBatches:
    """A batch sampler: the batches of another one, each with its number, which counts on from epoch to epoch."""

    def __init__(self, batches: ChainBatches | FullPasses) -> None:
        self.batches, self.epoch = batches, 0

    @property
    def batch_sampler(self) -> NumberedBatches:
        """The sampler itself: Trainer calls ``set_epoch`` on this attribute."""
        return self

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.batches.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[tuple[int, list[int]]]:
        return enumerate(self.batches, self.epoch * len(self))


class SeededRows(Dataset[Any]):
    """The rows of a data set for a worker, which seeds its generators (Python's, NumPy's, torch's) for each batch.

    The collator runs after the rows of a batch are read, in the same worker, so it draws from these generators, too.

    Args:
        rows: a map-style data set.
        key: the beginning of the key of each seed, before the number of the batch.
    """

    def __init__(self, rows: Any, *key: object) -> None:
        self.rows, self.key = rows, key

    def __len__(self) -> int:
        return len(self.rows)

    def __getitems__(self, batch: tuple[int, list[int]]) -> list[Any]:
        number, indices = batch
        set_seed(seed_of(*self.key, number) % 2**32)  # NumPy takes seeds of 32 bits
        if hasattr(self.rows, "__getitems__"):
            found: list[Any] = self.rows.__getitems__(indices)
            return found
        return [self.rows[index] for index in indices]
