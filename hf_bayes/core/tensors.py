"""Batches: mappings that hold tensors beside values of other kinds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor


def tensors_in(batch: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of a batch, without its other values."""
    return {name: value for name, value in batch.items() if isinstance(value, Tensor)}


def with_tensors(batch: Mapping[str, Any], change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """Return a batch with ``change`` of each of its tensors, and with its other values as they are."""
    return {**batch, **{name: change(value) for name, value in tensors_in(batch).items()}}
