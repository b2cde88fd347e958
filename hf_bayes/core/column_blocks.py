"""Elementwise functions of theta, computed a few columns at a time."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

BLOCK_ELEMENTS = 1 << 16
"""The number of elements of a tensor in one block on a CPU.

About ten such blocks fit into the caches, and each of two cores gets enough work.
"""

ACCELERATOR_ELEMENTS = 1 << 26
"""The same on an accelerator: a block takes longer than its launch, and is small beside the memory."""


def in_blocks(function: Callable[..., tuple[Tensor, ...]], *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return ``function(*tensors)`` for a function of tensors [M, ..., d] that treats every column separately.

    A tensor without axes, which is a number for all columns, is passed whole.

    A rule with forty elementary operations reads and writes [M, d] forty times. In blocks, the intermediate values stay
    in the cache of a CPU, and take little memory of an accelerator.
    """
    dim = tensors[0].shape[-1]
    most = BLOCK_ELEMENTS if tensors[0].device.type == "cpu" else ACCELERATOR_ELEMENTS
    width = max(1, most * dim // max(1, tensors[0].numel()))
    if dim <= width:
        return function(*tensors)
    results: tuple[Tensor, ...] = ()
    for start in range(0, dim, width):
        columns = slice(start, start + width)
        found = function(*(tensor[..., columns] if tensor.ndim else tensor for tensor in tensors))
        results = results or tuple(part.new_empty(*part.shape[:-1], dim) for part in found)
        for result, part in zip(results, found, strict=True):
            result[..., columns] = part
    return results
