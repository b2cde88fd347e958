"""KV caches whose layers hold B rows in the trunk and M * B rows from the first random layer on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer


def mergeable(cache: Any) -> bool:
    """Whether members run in several passes can each fill a cache of their own, to be pieced together in ``cache``."""
    plain = type(cache) is DynamicCache and all(type(layer) is DynamicLayer for layer in cache.layers)
    return plain and cache.get_seq_length() == 0


def merge_caches(target: Any, parts: list[Any], num_trunk: int) -> Any:
    """Fill ``target`` (or a new cache) with the caches of consecutive groups of members.

    Args:
        target: an empty DynamicCache, or None.
        parts: one cache a group, in the order of the members.
        num_trunk: layers of the trunk, alike in all parts; the others' rows follow one another, member-major.
    """
    target = DynamicCache() if target is None else target
    for index in range(len(parts[0].layers)):
        layers = [part.layers[index] for part in (parts[:1] if index < num_trunk else parts)]
        target.update(torch.cat([layer.keys for layer in layers]), torch.cat([layer.values for layer in layers]), index)
    return target


def reorder_cache(cache: Any, beam_idx: Tensor, num_members: int, num_trunk: int) -> Any:
    """Permute sequences in place: row b of a trunk layer, rows m * B + b of all members elsewhere.

    Raises:
        ValueError: if a layer has other rows; the index would silently drop members.
    """
    offsets = torch.arange(num_members, device=beam_idx.device)[:, None] * len(beam_idx)
    folded = (offsets + beam_idx).flatten()
    for index, layer in enumerate(cache.layers):
        rows = beam_idx if index < num_trunk else folded
        if layer.get_seq_length() > 0 and layer.keys.shape[0] != len(rows):
            raise ValueError(f"layer {index} of the cache has {layer.keys.shape[0]} rows, expected {len(rows)}")
        layer.reorder_cache(rows)
    return cache
