"""Pairs of texts as rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_bayes.training.preferences import PairRows


def halves(rows: list[Any]) -> dict[str, Any]:
    """Collate as TRL does: the preferred texts first."""
    ids = torch.tensor([row[0] for row in rows] + [row[1] for row in rows])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def test_the_texts_of_a_pair_become_one_row() -> None:
    batch = PairRows(halves)([([1, 2], [3, 4]), ([5, 6], [7, 8])])
    assert batch["input_ids"].tolist() == [[[1, 2], [3, 4]], [[5, 6], [7, 8]]]
    assert batch["attention_mask"].shape == (2, 2, 2)
    assert batch["labels"].tolist() == [0, 0]


def test_rows_of_two_texts_pass_unchanged() -> None:
    given = {"input_ids": torch.ones(3, 2, 4, dtype=torch.long), "labels": torch.tensor([0, 1, 0])}
    assert PairRows(lambda rows: given)([0, 1, 2]) == given


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ({"labels": torch.zeros(2)}, r"preferences need pairs of texts, got a batch with \['labels'\]"),
        ({"input_ids": torch.ones(4, 2), "margin": torch.ones(2)}, "margins of preferences"),
        ({"input_ids": torch.ones(2, 2)}, "made 2 texts of 2 rows, expected 2 for each"),
    ],
)
def test_other_batches_are_refused(batch: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        PairRows(lambda rows: batch)([0, 1])
