"""A collator of preferences: the batches of TRL's RewardTrainer and DPOTrainer as rows of two texts with a label."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from hf_bayes.models.preferences import REFERENCE

_REFERENCES = ("ref_chosen_logps", "ref_rejected_logps")
_IN_HALVES = ("input_ids", "attention_mask", "completion_mask")


def pairs_of(batch: Mapping[str, Any], num_rows: int) -> dict[str, Any]:
    """Return a batch of texts, whose first half are the preferred ones, as pairs: [2 B, T] become [B, 2, T].

    Args:
        num_rows: B.
    """
    return {
        name: torch.stack(list(value.chunk(2)), 1)
        for name, value in batch.items()
        if isinstance(value, Tensor) and value.shape[:1] == (2 * num_rows,)
    }


def as_trl_batch(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return a batch of pairs as TRL has it: [B, 2, T] become [2 B, T], the first texts before the second."""
    return {name: torch.cat(batch[name].unbind(1)) for name in _IN_HALVES if name in batch}


class PairRows:
    """Collate pairs: the halves of a batch [2 B, T], preferred texts first, become rows [B, 2, T] with label 0.

    A batch that has rows of two texts already passes unchanged.

    Args:
        collate: rows -> a batch.
        precomputed: whether the reference log-probabilities of DPO are columns of the data. If not, columns of their
            names are left out, as TRL does not read them.
    """

    def __init__(self, collate: Callable[..., Any], *, precomputed: bool = False) -> None:
        self.collate, self.precomputed = collate, precomputed

    def __call__(self, rows: Any) -> dict[str, Any]:
        batch = dict(self.collate(rows))
        ids = batch.get("input_ids")
        if not isinstance(ids, Tensor):
            raise ValueError(
                f"preferences need pairs of texts, got a batch with {sorted(batch)}: give rows with chosen_ids and "
                "rejected_ids to TRL's RewardTrainer or DPOTrainer, or input_ids [2, tokens] with a label 0 or 1 "
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
        references = [batch.pop(name, None) for name in _REFERENCES]
        if self.precomputed and references[0] is not None:
            batch[REFERENCE] = torch.stack(references, 1)
        return {**batch, **pairs_of(batch, len(rows)), "labels": torch.zeros(len(rows), dtype=torch.long)}
