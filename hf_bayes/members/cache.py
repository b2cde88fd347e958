"""KV caches whose layers hold B rows in the trunk and M * B rows from the first random layer on, with room to grow."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

ROOM = 32
"""Positions that a ``RoomyLayer`` takes more than it needs when it grows: all are copied once in so many tokens."""


class RoomyLayer(DynamicLayer):
    """A ``DynamicLayer`` that writes a new position behind the others, in place.

    Its parent copies all of them for every token: of M members that is several times what attention reads. Keys and
    values are views of a larger tensor; whoever puts others in their place (beams, ``crop``) has them copied once.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.rooms: dict[str, Tensor] = {}
        self.views: dict[str, Tensor] = {}

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if key_states.requires_grad or value_states.requires_grad:  # what autograd keeps must not change
            return super().update(key_states, value_states, *args, **kwargs)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys, self.values = self._appended("keys", key_states), self._appended("values", value_states)
        return self.keys, self.values

    def _appended(self, name: str, states: Tensor) -> Tensor:
        held = getattr(self, name)
        start = held.shape[-2] if held.numel() else 0
        stop = start + states.shape[-2]
        room = self.rooms.get(name)
        if (
            room is None
            or held is not self.views[name]
            or stop > room.shape[-2]
            or (room.is_inference() and not torch.is_inference_mode_enabled())
        ):
            room = states.new_empty(*states.shape[:-2], stop + ROOM, states.shape[-1])
            if start:
                room[..., :start, :] = held
            self.rooms[name] = room
        room.narrow(-2, start, stop - start).copy_(states)
        self.views[name] = room.narrow(-2, 0, stop)
        return self.views[name]


def leave_room(cache: Any) -> Any:
    """The cache, its plain layers replaced by roomy ones; caches of other kinds as they are."""
    if type(cache) is DynamicCache and not cache.offloading:
        for index, layer in enumerate(cache.layers):
            if type(layer) is DynamicLayer:
                cache.layers[index] = roomy = RoomyLayer()
                roomy.__dict__.update(layer.__dict__)
    return cache


_MERGEABLE = (DynamicLayer, RoomyLayer, DynamicSlidingWindowLayer)


def mergeable(cache: Any) -> bool:
    """Whether members run in several passes can each fill a cache of their own, to be pieced together in ``cache``."""
    plain = type(cache) is DynamicCache and not cache.offloading
    layers = plain and all(type(layer) in _MERGEABLE for layer in cache.layers)
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
    require_rows(cache, len(beam_idx), num_members, num_trunk)
    offsets = torch.arange(num_members, device=beam_idx.device)[:, None] * len(beam_idx)
    folded = (offsets + beam_idx).flatten()
    for index, layer in enumerate(cache.layers):
        layer.reorder_cache(beam_idx if index < num_trunk else folded)
    return cache


def require_rows(cache: Any, num_rows: int, num_members: int, num_trunk: int) -> None:
    """Raise ValueError if a layer holds other than B rows in the trunk, or M * B elsewhere; an empty one holds none."""
    for index, layer in enumerate(cache.layers):
        expected = num_rows if index < num_trunk else num_members * num_rows
        for found in _rows_held(layer) - {expected}:
            raise ValueError(
                f"layer {index} of the cache has {found} rows, expected {expected}: it was filled by other sequences "
                "or members. For more sequences of each prompt (num_beams, num_return_sequences) repeat its rows: "
                "cache.batch_repeat_interleave(...)"
            )


def _rows_held(layer: Any) -> set[int]:
    """Rows of the keys of a layer, or of the states of linear attention; none of an empty one."""
    held = [getattr(layer, "keys", None)]
    for name in ("conv_states", "recurrent_states"):
        held += getattr(layer, name, {}).values()
    return {states.shape[0] for states in held if isinstance(states, Tensor) and states.numel() > 0}
