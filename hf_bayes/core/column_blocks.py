"""Elementwise work on theta, a few columns at a time."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

BLOCK_ELEMENTS = 1 << 16
"""Of a tensor in a block on a CPU: some ten of them stay in the caches, and two cores get a grain of work each."""


def in_blocks(function: Callable[..., tuple[Tensor, ...]], *tensors: Tensor) -> tuple[Tensor, ...]:
    """``function(*tensors)`` for a function of tensors [M, ..., d] that treats every column on its own.

    Tensors without an axis of columns, numbers of all of them, are handed on whole.

    A rule of forty elementary operations makes forty passes over memory when they follow each other on [M, d]; here
    what lies between arguments and results stays in the cache. Accelerators, where launches cost more, get one block.
    """
    dim = tensors[0].shape[-1]
    width = max(1, BLOCK_ELEMENTS * dim // max(1, tensors[0].numel()))
    if tensors[0].device.type != "cpu" or dim <= width:
        return function(*tensors)
    results: tuple[Tensor, ...] = ()
    for start in range(0, dim, width):
        columns = slice(start, start + width)
        found = function(*(tensor[..., columns] if tensor.ndim else tensor for tensor in tensors))
        results = results or tuple(part.new_empty(*part.shape[:-1], dim) for part in found)
        for result, part in zip(results, found, strict=True):
            result[..., columns] = part
    return results
