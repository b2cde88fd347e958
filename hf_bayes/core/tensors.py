"""Functions of batches, which are mappings that hold tensors and other values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor


def tensors_in(batch: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of a batch, without its other values."""
    return {name: value for name, value in batch.items() if isinstance(value, Tensor)}


def shape_in_words(value: Any) -> str:
    """Return the shape of a tensor, or the type of any other value, for an error."""
    return f"shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def with_tensors(batch: Mapping[str, Any], change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """Return a copy of a batch in which ``change`` is applied to each tensor; other values stay as they are."""
    return {**batch, **{name: change(value) for name, value in tensors_in(batch).items()}}
