"""An iterator over the rows of members' logits, in blocks small enough for the processor caches.

Working in blocks avoids allocating temporary tensors as large as the logits.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import torch
from torch import Tensor

# Bytes of a block. On CPU the part of each thread should fit in its cache. On an accelerator, a block should be large
# enough that running a kernel takes longer than launching it.
_BLOCK_BYTES_THREAD = 1 << 20
_MAX_THREADS = 4
_BLOCK_BYTES_ACCELERATOR = 64 << 20


class RowBlocks:
    """The N rows of [M, ..., C] logits, cut into blocks [M, c, C]. All blocks share two buffers."""

    def __init__(self, logits: Tensor) -> None:
        if logits.ndim < 2 or logits.shape[0] == 0 or logits.shape[-1] == 0 or not logits.is_floating_point():
            raise ValueError(
                "uncertainty needs floating point logits [M >= 1, ..., C >= 1] with the members first, "
                f"got {list(logits.shape)} {logits.dtype}"
            )
        self.logits = logits
        self.num_classes = logits.shape[-1]
        self.num_rows = math.prod(logits.shape[1:-1])
        self.dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        # Sums that hold one number per row are float64, because their rounding is the rounding of the result. GPUs of
        # Apple have no float64.
        self.sum_dtype = torch.float32 if logits.device.type == "mps" else torch.float64
        on_cpu = logits.device.type == "cpu"
        threads = min(torch.get_num_threads(), _MAX_THREADS)
        limit = _BLOCK_BYTES_THREAD * threads if on_cpu else _BLOCK_BYTES_ACCELERATOR
        self.block_rows = max(1, limit // (len(logits) * self.num_classes * self.dtype.itemsize))

    @functools.cached_property
    def _buffers(self) -> Tensor:
        size = len(self.logits) * min(self.block_rows, self.num_rows) * self.num_classes
        return torch.empty(2, size, dtype=self.dtype, device=self.logits.device)

    def empty(self, *trailing: int) -> Tensor:
        """Return an empty [N, *trailing] tensor for results.

        Its dtype is ``dtype``, or ``sum_dtype`` if there is one number per row.
        """
        dtype = self.dtype if trailing else self.sum_dtype
        return torch.empty(self.num_rows, *trailing, dtype=dtype, device=self.logits.device)

    def rows(self, keep: Tensor | None = None) -> Iterator[tuple[slice | Tensor, Tensor]]:
        """Yield pairs: the indices of the block's rows among the N rows, and the block [M, c, C].

        Args:
            keep: [...] bool; rows where it is False are left out.
        """
        first = 0
        for tile in _tiles(self.logits):
            num_rows = tile.shape[1]
            if keep is None:
                for row in range(0, num_rows, self.block_rows):
                    rows = slice(first + row, first + min(row + self.block_rows, num_rows))
                    yield rows, tile[:, row : row + self.block_rows]
            else:
                kept = keep.reshape(-1)[first : first + num_rows].nonzero()[:, 0]
                for row in range(0, len(kept), self.block_rows):
                    some = kept[row : row + self.block_rows]
                    yield first + some, _select(tile, some)
            first += num_rows

    def buffers(self, block: Tensor) -> tuple[Tensor, Tensor]:
        """Return two tensors of the block's shape, which are valid until the next call."""
        one, two = self._buffers[:, : block.numel()]
        return one.view(block.shape), two.view(block.shape)


def _tiles(logits: Tensor) -> Iterator[Tensor]:
    """Yield [M, ..., C] logits as views [M, n, C].

    Copying sliced logits (``logits[:, :, :-1]``) into one [M, N, C] tensor would double the memory.
    """
    num_members, *lead, num_classes = logits.shape
    try:
        yield logits.view(num_members, math.prod(lead), num_classes)
    except RuntimeError:
        for part in logits.unbind(1):
            yield from _tiles(part)


def _select(tile: Tensor, rows: Tensor) -> Tensor:
    """Return ``tile[:, rows]`` by one ``index_select`` per member.

    Plain indexing is slow. A single ``index_select`` over all members would first copy a sliced tile as a whole.
    """
    result = tile.new_empty(len(tile), len(rows), tile.shape[-1])
    for member, out in zip(tile, result, strict=True):
        torch.index_select(member, 0, rows, out=out)
    return result
