"""The rows that each chain sees: batch samplers, and whole updates of a stream."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader, IterableDataset

from hf_bayes.core.rng import generator

PAD_ROWS = "take a collator that pads rows in place of packing them"


class ChainBatches:
    """A batch sampler: update s of a chain takes rows [s * R, (s + 1) * R) of its own endless stream of permutations.

    The stream is a pure function of (seed, chain): it does not change with the number of chains. A micro-batch holds
    ``batch_size`` rows of each chain, chain after chain; no batch is short. Processes that share chains take turns.

    With ``order="epochs"`` a permutation is used up before the next one begins, so the rows of an update depend on
    earlier rows. Methods that compare batches need more: with ``"independent"`` each batch is the beginning of a
    permutation of its own, and with ``"disjoint"`` each update is.

    Args:
        num_rows: n, the number of rows of the data set.
        batch_size: the number of rows of a micro-batch for each chain.
        accumulation: the number of micro-batches of an update; R = batch_size * accumulation * data_size.
        chains: the global numbers of the chains; None means that all see the same rows.
        seed: the seed of the permutations.
        data_rank, data_size: the number of this process, from 0, and of all processes that share these chains.
        order: the order of rows, see above.
        updates_per_epoch: the number of updates of an epoch; None takes as many as go through all rows once.
    Raises:
        ValueError: if a batch or an update needs more different rows than there are.
    """

    def __init__(
        self,
        num_rows: int,
        *,
        batch_size: int,
        accumulation: int,
        chains: range | None,
        seed: int,
        data_rank: int = 0,
        data_size: int = 1,
        order: Literal["epochs", "independent", "disjoint"] = "epochs",
        updates_per_epoch: int | None = None,
    ) -> None:
        self.num_rows, self.batch_size, self.accumulation, self.seed = num_rows, batch_size, accumulation, seed
        rows = batch_size * accumulation * data_size
        self.period = {"epochs": num_rows, "independent": batch_size, "disjoint": rows}[order]
        if self.period > num_rows:
            raise ValueError(
                f"order={order!r} cannot draw {self.period} different rows of {num_rows}: lower "
                "per_device_train_batch_size or gradient_accumulation_steps"
            )
        self.data_rank, self.data_size = data_rank, data_size
        self.streams: list[object] = ["shared"] if chains is None else list(chains)
        self.epoch = 0
        self.updates_per_epoch = updates_per_epoch or -(-num_rows // rows)
        self._permutations: dict[tuple[object, int], list[int]] = {}

    @property
    def batch_sampler(self) -> ChainBatches:
        """The sampler itself: Trainer calls ``set_epoch`` on this attribute."""
        return self

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.updates_per_epoch * self.accumulation

    def __iter__(self) -> Iterator[list[int]]:
        for micro in range(self.epoch * len(self), (self.epoch + 1) * len(self)):
            start = (micro * self.data_size + self.data_rank) * self.batch_size
            yield [self._row(s, i) for s in self.streams for i in range(start, start + self.batch_size)]

    def _row(self, stream: object, position: int) -> int:
        key = (stream, position // self.period)
        if key not in self._permutations:
            # an update has rows of at most two permutations: older ones are dropped
            self._permutations = {k: v for k, v in self._permutations.items() if k[0] != stream or k[1] >= key[1] - 1}
            order = torch.randperm(self.num_rows, generator=generator(self.seed, "order", *key))
            self._permutations[key] = order[: self.period].tolist()
        return self._permutations[key][position % self.period]


class FullPasses:
    """A batch sampler for exact kernels: an update is one pass over all rows, in order, in batches of about equal size.

    Args:
        num_rows: n, the number of rows of the data set.
        batch_size: the largest number of rows of a micro-batch.
        data_rank, data_size: the number of this process, from 0, and of all processes that share these rows. All have
            the same number of micro-batches.
    Raises:
        ValueError: if there are too few rows for that many processes.
    """

    def __init__(self, num_rows: int, *, batch_size: int, data_rank: int = 0, data_size: int = 1) -> None:
        self.num_batches = -(-num_rows // (batch_size * data_size))
        if num_rows // data_size < self.num_batches:
            raise ValueError(
                f"{num_rows} rows cannot give {data_size} processes {self.num_batches} batches each of at most "
                f"{batch_size} rows: raise per_device_train_batch_size, or launch fewer processes per chain"
            )
        self.rows = torch.arange(num_rows).tensor_split(data_size)[data_rank]

    @property
    def batch_sampler(self) -> FullPasses:
        return self

    def set_epoch(self, epoch: int) -> None:
        """Do nothing: every epoch is alike."""

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self.rows.tensor_split(self.num_batches):
            yield batch.tolist()


class WholeUpdates(IterableDataset[Any]):
    """The micro-batches of a stream, pass after pass without end. A pass ends after its last whole update.

    Update s of a pass takes its rows [s * R, (s + 1) * R), however they are divided into micro-batches and processes.
    The position in the stream follows from the number of updates alone, so a run can be resumed. The last rows of a
    pass, if they are fewer than R, are left out. A stream that is shuffled for each pass leaves out other rows each
    time.

    Args:
        loader: the loader of a pass, without short batches. Its data set gets the number of each pass (``set_epoch``).
        accumulation: the number of micro-batches of an update.
        name: the name of the data set in messages, with its type.
        before_update: called with the number of an update, from 0, before its rows are read; once more if the pass ends
            before the update is whole.
    Raises:
        ValueError: if a pass has fewer rows than an update.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        accumulation: int,
        *,
        name: str,
        before_update: Callable[[int], None] | None = None,
    ) -> None:
        self.loader, self.accumulation, self.name = loader, accumulation, name
        self.before_update = before_update or (lambda number: None)

    def __iter__(self) -> Iterator[Any]:
        total = 0
        for number in itertools.count():
            self.loader.dataset.set_epoch(number)  # type: ignore[attr-defined]
            batches, found = iter(self.loader), 0
            while len(update := self._read(batches, total + found)) == self.accumulation:
                found += 1
                yield from update
            total += found
            if found == 0:
                raise ValueError(
                    f"pass {number + 1} over {self.name} ended after {len(update)} batches of "
                    f"{self.loader.batch_size} rows for each process that shares a chain, and an update takes "
                    f"{self.accumulation}. Lower per_device_train_batch_size or gradient_accumulation_steps, or give "
                    "it more rows; a stream must begin again whenever it is iterated over"
                )

    def _read(self, batches: Iterator[Any], number: int) -> list[Any]:
        """Return the next micro-batches, for this update; fewer at the end of a pass."""
        self.before_update(number)
        return list(itertools.islice(batches, self.accumulation))
