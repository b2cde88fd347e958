"""A collator whose labels carry further columns of the data, such as the weights of rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hf_bayes.uncertainty.likelihoods import Likelihood


def columns_of(likelihood: Likelihood) -> tuple[str, ...]:
    """Return the columns of the data that a likelihood reads beside the labels."""
    return () if likelihood.config is None else likelihood.config.columns


def with_columns(likelihood: Likelihood, collate: Callable[..., Any]) -> Callable[..., Any]:
    """Return the collator whose labels carry the columns that a likelihood reads, or ``collate`` without columns."""
    columns = columns_of(likelihood)
    return LabelColumns(collate, columns, likelihood.name) if columns else collate


class LabelColumns:
    """Collate rows, and append columns to their labels: [B] or [B, D] labels become [B, D + number of columns].

    Args:
        collate: rows -> a batch, in which the columns are tensors [B].
        columns: the names of the columns.
        name: the name of the likelihood that reads them, for messages.
    """

    def __init__(self, collate: Callable[..., Any], columns: tuple[str, ...], name: str) -> None:
        self.collate, self.columns, self.name = collate, columns, name

    def __call__(self, rows: Any) -> dict[str, Any]:
        batch = dict(self.collate(rows))
        found = [self._column(batch, name) for name in self.columns]
        labels = batch.get("labels")
        if labels is not None:
            kind = torch.promote_types(labels.dtype, torch.float32)  # exact for class numbers up to 2**24
            parts = [labels.reshape(len(labels), -1), *(value.reshape(len(labels), 1) for value in found)]
            batch["labels"] = torch.cat([part.to(kind) for part in parts], 1)
        return batch

    def _column(self, batch: dict[str, Any], name: str) -> Tensor:
        value = batch.pop(name, None)
        if not isinstance(value, Tensor) or value.ndim != 1:
            got = "no such column" if value is None else f"{type(value).__name__} {list(getattr(value, 'shape', ()))}"
            raise ValueError(
                f"the likelihood {self.name} reads one number for each row from the column {name!r}, got {got} in a "
                f"batch with {sorted(batch)}: add the column to the data set, also to held-out rows, and let the data "
                "collator keep it"
            )
        return value
