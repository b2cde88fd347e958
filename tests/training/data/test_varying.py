from __future__ import annotations

import random
from typing import Any

from torch.utils.data import Dataset
from transformers import default_data_collator

from hf_bayes.training.data.varying import rows_vary
from tests.runs import token_rows


class Reversed(Dataset[Any]):
    """Rows that are read backwards half of the time."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = token_rows(8)[index]
        return {**row, "input_ids": row["input_ids"][:: random.choice((1, -1))]}


def test_augmentation_that_spares_half_of_the_rows_is_noticed() -> None:
    assert all(
        rows_vary(Reversed(), default_data_collator, seed=seed) for seed in range(20)
    )  # 8 rows alike in 4 looks: 6e-8


def test_rows_that_stay_the_same_do_not_vary() -> None:
    assert not rows_vary(token_rows(10), default_data_collator, seed=0)


def test_readings_consume_no_random_numbers() -> None:
    random.seed(1)
    expected = random.random()
    random.seed(1)
    assert rows_vary(Reversed(), default_data_collator, seed=0)
    assert random.random() == expected
