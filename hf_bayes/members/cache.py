"""KV caches for M members: layers of the trunk hold B rows, and layers after it hold M * B rows.

Layers reserve room for new positions, so a new token does not copy the whole cache.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

ROOM = 32
"""Free positions that a ``RoomyLayer`` reserves when it grows. It copies its contents once in so many tokens."""


class RoomyLayer(DynamicLayer):  # type: ignore[no-untyped-call, unused-ignore]
    """A ``DynamicLayer`` that writes new positions in place, into reserved room.

    ``DynamicLayer`` copies all positions for every token. For M members that is several times what attention reads.
    Here keys and values are views of a larger tensor. If other code replaces them (beam search, ``crop``), they are
    copied once.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)  # type: ignore[no-untyped-call, unused-ignore]
        self.buffers: dict[str, Tensor] = {}
        self.views: dict[str, Tensor] = {}

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not all(_takes_writes(states) for states in (key_states, value_states, *self._held())):
            return super().update(key_states, value_states, *args, **kwargs)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys, self.values = self._append("keys", key_states), self._append("values", value_states)
        return self.keys, self.values

    def _held(self) -> list[Tensor]:
        """Return the keys and values so far; nothing before the first token."""
        return [states for states in (self.keys, self.values) if states is not None]

    def _append(self, name: str, states: Tensor) -> Tensor:
        """Append positions to ``keys`` or ``values``, and return the view of all positions."""
        held = getattr(self, name)
        start = held.shape[-2] if held.numel() else 0
        stop = start + states.shape[-2]
        buffer = self.buffers.get(name)
        if (
            buffer is None
            or held is not self.views[name]
            or stop > buffer.shape[-2]
            or (buffer.is_inference() and not torch.is_inference_mode_enabled())
        ):
            buffer = states.new_empty(*states.shape[:-2], stop + ROOM, states.shape[-1])
            if start:
                buffer[..., :start, :] = held
            self.buffers[name] = buffer
        buffer.narrow(-2, start, stop - start).copy_(states)
        self.views[name] = buffer.narrow(-2, 0, stop)
        return self.views[name]


def _takes_writes(states: Tensor) -> bool:
    """Return whether states may lie in a tensor that changes.

    False for tensors that autograd saves, and for subclasses. An object of a subclass holds more than its values, such
    as a covariance.
    """
    return type(states) is Tensor and not states.requires_grad


def leave_room(cache: Any) -> Any:
    """Replace the ``DynamicLayer``s of a ``DynamicCache`` by ``RoomyLayer``s; other caches are returned unchanged."""
    if type(cache) is DynamicCache and not cache.offloading:
        for index, layer in enumerate(cache.layers):
            if type(layer) is DynamicLayer:
                cache.layers[index] = roomy_layer = RoomyLayer()
                roomy_layer.__dict__.update(layer.__dict__)
    return cache


_MERGEABLE = (DynamicLayer, RoomyLayer, DynamicSlidingWindowLayer)


def mergeable(cache: Any) -> bool:
    """Check that groups of members can fill a cache each, and ``merge_caches`` can join them in the empty ``cache``."""
    return (
        type(cache) is DynamicCache
        and not cache.offloading
        and all(type(layer) in _MERGEABLE for layer in cache.layers)
        and cache.get_seq_length() == 0
    )


def empty_like(cache: DynamicCache) -> DynamicCache:
    """Return a copy of an empty cache, with the same full and sliding layers, for one group of members."""
    return copy.deepcopy(cache)


def merge_caches(target: DynamicCache, parts: list[DynamicCache], num_trunk: int) -> DynamicCache:
    """Fill ``target`` with the caches of consecutive groups of members.

    Args:
        target: an empty ``DynamicCache``.
        parts: one cache per group, in the order of the members. The result uses the layers of the first one.
        num_trunk: number of layers of the trunk, which are equal in all parts. The rows of later layers are
            concatenated, member-major.
    """
    for layers in list(zip(*(part.layers for part in parts), strict=True))[num_trunk:]:
        merged = layers[0]  # keep this object: a sliding layer also counts the positions that have left its window
        if merged.is_initialized:
            merged.keys = torch.cat([layer.keys for layer in layers])
            merged.values = torch.cat([layer.values for layer in layers])
    target.layers = parts[0].layers
    return target


def reorder_cache(cache: Any, beam_idx: Tensor, num_members: int, num_trunk: int) -> Any:
    """Permute sequences in place: row b of a layer of the trunk, rows m * B + b for all members m of a later layer.

    Raises:
        ValueError: if a layer has another number of rows, because the index would silently drop members.
    """
    require_cache_rows(cache, len(beam_idx), num_members, num_trunk)
    offsets = torch.arange(num_members, device=beam_idx.device)[:, None] * len(beam_idx)
    folded = (offsets + beam_idx).flatten()
    for index, layer in enumerate(cache.layers):
        layer.reorder_cache(beam_idx if index < num_trunk else folded)
    return cache


def require_cache_rows(cache: Any, num_rows: int, num_members: int, num_trunk: int) -> None:
    """Check that layers of the trunk hold B rows and later layers M * B rows; an empty layer passes.

    Raises:
        ValueError: naming the first layer with another number of rows.
    """
    for index, layer in enumerate(cache.layers):
        expected = num_rows if index < num_trunk else num_members * num_rows
        for found in _rows_held(layer) - {expected}:
            raise ValueError(
                f"layer {index} of the cache has {found} rows, expected {expected}: it was filled by other sequences "
                "or members. For more sequences of each prompt (num_beams, num_return_sequences) repeat its rows: "
                "cache.batch_repeat_interleave(...)"
            )


def holds_states_alone(cache: Any) -> bool:
    """Return whether a filled cache holds states without keys, which do not say how many tokens they have read."""
    linear = list(getattr(cache, "is_linear", ()))
    return bool(linear) and all(linear) and any(_rows_held(layer) for layer in cache.layers)


def _rows_held(layer: Any) -> set[int]:
    """Return the numbers of rows of a layer's keys or linear-attention states; empty for an empty layer."""
    held = [getattr(layer, "keys", None)]
    for name in ("conv_states", "recurrent_states"):
        held += getattr(layer, name, {}).values()
    return {states.shape[0] for states in held if isinstance(states, Tensor) and states.numel() > 0}
