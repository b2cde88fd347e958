"""Functions of batches, which are mappings that hold tensors and other values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def tensors_in(batch: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of a batch, without its other values."""
    return {name: value for name, value in batch.items() if isinstance(value, Tensor)}


def shape_in_words(value: Any) -> str:
    """Return the shape of a tensor, or the type of any other value, for an error."""
    return f"shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def joined(pieces: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Concatenate dictionaries of tensors; a single one, as in every step of decoding, is not copied."""
    if len(pieces) == 1:
        return dict(pieces[0])
    return {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}


def with_tensors(batch: Mapping[str, Any], change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """Return a copy of a batch in which ``change`` is applied to each tensor; other values stay as they are."""
    return {**batch, **{name: change(value) for name, value in tensors_in(batch).items()}}
