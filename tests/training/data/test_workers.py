from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from datasets import Dataset

from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from hf_bayes.objectives.batches import ChainBatches
from hf_bayes.training.data.workers import NumberedBatches, SeededRows
from tests import runs


class Drawn:
    """Rows that are random numbers of Python's, NumPy's and torch's generators."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, row: int) -> tuple[float, ...]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_batches_are_numbered_from_epoch_to_epoch() -> None:
    def batches() -> ChainBatches:
        return ChainBatches(6, batch_size=2, accumulation=1, chains=range(2), seed=0)

    numbered, plain = NumberedBatches(batches()), batches()
    assert len(numbered) == 3
    for epoch in (0, 1):
        numbered.batch_sampler.set_epoch(epoch)
        plain.set_epoch(epoch)
        assert list(numbered) == list(zip(range(3 * epoch, 3 * epoch + 3), plain, strict=True))


def test_a_batch_draws_by_its_number_and_its_key_alone() -> None:
    def drawn(*key: object, number: int) -> list[Any]:
        return SeededRows(Drawn(), *key).__getitems__((number, [0, 1]))

    found = drawn(7, "workers", number=3)
    assert len({value for row in found for value in row}) == 6
    drawn(7, "workers", number=4)
    assert drawn(7, "workers", number=3) == found
    others = drawn(7, "workers", number=4), drawn(8, "workers", number=3)
    for other in others:
        assert not {value for row in other for value in row} & {value for row in found for value in row}


def test_rows_of_datasets_are_read_at_once() -> None:
    rows = Dataset.from_dict({"x": [10, 11, 12]})
    seeded = SeededRows(rows, 0)
    assert len(seeded) == 3
    assert seeded.__getitems__((0, [2, 0])) == [{"x": 12}, {"x": 10}]


def test_chains_with_rows_of_their_own_draw_their_own_numbers(tmp_path: Any) -> None:
    def key(**changes: Any) -> tuple[object, ...]:
        trainer = runs.trainer(tmp_path, SGHMCConfig(num_chains=2), dataloader_num_workers=1, **changes)
        found: tuple[object, ...] = trainer.rows.loader().dataset.key
        return found

    assert len({key(), key(minibatch="shared"), key(seed=1), key(data_seed=2)}) == 4
