"""A collator of preferences: the batches of TRL's RewardTrainer as rows of two texts with a label."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class PairRows:
    """Collate pairs: the halves of a batch [2 B, T], preferred texts first, become rows [B, 2, T] with label 0.

    A batch that has rows of two texts already passes unchanged.

    Args:
        collate: rows -> a batch.
    """

    def __init__(self, collate: Callable[..., Any]) -> None:
        self.collate = collate

    def __call__(self, rows: Any) -> dict[str, Any]:
        batch = dict(self.collate(rows))
        ids = batch.get("input_ids")
        if not isinstance(ids, Tensor):
            raise ValueError(
                f"preferences need pairs of texts, got a batch with {sorted(batch)}: give rows with chosen_ids and "
                "rejected_ids to TRL's RewardTrainer, or input_ids [2, tokens] with a label 0 or 1 "
                "(docs/rewards.md)"
            )
        if ids.ndim == 3:
            return batch
        if "margin" in batch:
            raise ValueError(
                "the data have margins of preferences, and log sigmoid(difference - margin) is not supported: remove "
                "the column 'margin'"
            )
        if len(ids) != 2 * len(rows):
            raise ValueError(
                f"the data collator made {len(ids)} texts of {len(rows)} rows, expected 2 for each: the preferred "
                "texts of all rows, and then the others"
            )
        pairs = {
            name: torch.stack(list(value.chunk(2)), 1)
            for name, value in batch.items()
            if isinstance(value, Tensor) and value.shape[:1] == ids.shape[:1]
        }
        return {**batch, **pairs, "labels": torch.zeros(len(rows), dtype=torch.long)}
