"""The positions at which a forward pass returns logits: the argument ``logits_to_keep`` of transformers."""

from __future__ import annotations

import torch
from torch import Tensor

LogitsToKeep = int | slice | Tensor
"""The last k positions (0 means all), a slice, or a tensor: positions, also negative ones, or a mask [T] of them."""


def kept_positions(logits_to_keep: LogitsToKeep, length: int, device: torch.device) -> Tensor:
    """Return the positions [n], from 0 to T - 1, that ``logits_to_keep`` selects from T positions.

    Transformers indexes the hidden states [B, T, h] with it. We select before rows are joined, so every row needs
    positions from its own beginning.
    """
    index = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
    if isinstance(index, Tensor):
        index = index.to(device)
    return torch.arange(length, device=device)[index]


def num_last_kept(logits_to_keep: LogitsToKeep) -> int:
    """Return k if ``logits_to_keep`` is k > 0, the last k positions; 0 for every other selection."""
    return max(0, logits_to_keep) if isinstance(logits_to_keep, int) else 0
