"""KV caches whose layers hold B rows in the trunk and M * B rows from the first random layer on."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer


def mergeable(cache: Any) -> bool:
    """Whether members run in several passes can each fill a cache of their own, to be pieced together in ``cache``."""
    plain = type(cache) is DynamicCache and not cache.offloading
    layers = plain and all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in cache.layers)
    return layers and cache.get_seq_length() == 0


def empty_like(cache: DynamicCache) -> DynamicCache:
    """A cache of the same layers, full and sliding, for one group of members."""
    return copy.deepcopy(cache)  # of an empty one


def merge_caches(target: DynamicCache, parts: list[DynamicCache], num_trunk: int) -> DynamicCache:
    """Fill ``target`` with the caches of consecutive groups of members.

    Args:
        target: an empty DynamicCache.
        parts: one cache a group, in the order of the members; layers are taken over from the first.
        num_trunk: layers of the trunk, alike in all parts; the others' rows follow one another, member-major.
    """
    for layers in list(zip(*(part.layers for part in parts), strict=True))[num_trunk:]:
        merged = layers[0]  # a sliding layer also counts the positions that have left its window
        if merged.is_initialized:
            merged.keys = torch.cat([layer.keys for layer in layers])
            merged.values = torch.cat([layer.values for layer in layers])
    target.layers = parts[0].layers
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
        for found in _rows_held(layer) - {len(rows)}:
            raise ValueError(f"layer {index} of the cache has {found} rows, expected {len(rows)}")
        layer.reorder_cache(rows)
    return cache


def _rows_held(layer: Any) -> set[int]:
    """Rows of the keys of a layer, or of the states of linear attention; none of an empty one."""
    held = [getattr(layer, "keys", None)]
    for name in ("conv_states", "recurrent_states"):
        held += getattr(layer, name, {}).values()
    return {states.shape[0] for states in held if isinstance(states, Tensor) and states.numel() > 0}
