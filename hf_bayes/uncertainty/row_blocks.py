"""The rows of members' logits in blocks that stay in the caches: nothing of the size of the logits is allocated."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import torch
from torch import Tensor

# Bytes of a block. On CPU each thread's share should stay in its cache; elsewhere launching a kernel must not cost more
# than running it.
_BLOCK_BYTES_THREAD = 1 << 20
_MAX_THREADS = 4
_BLOCK_BYTES_ACCELERATOR = 64 << 20


class RowBlocks:
    """The N rows of [M, ..., C] logits in blocks [M, c, C], with two buffers that all blocks share."""

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
        # One number a row is kept in float64: its last bits are those of the result. Apple's GPUs have no float64.
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
        """[N, *trailing] for results: of the block's dtype, or one number a row in that of sums."""
        dtype = self.dtype if trailing else self.sum_dtype
        return torch.empty(self.num_rows, *trailing, dtype=dtype, device=self.logits.device)

    def rows(self, keep: Tensor | None = None) -> Iterator[tuple[slice | Tensor, Tensor]]:
        """Pairs of where the block's rows are among the N, and the block; ``keep`` [...] bool leaves rows out."""
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
        """Two tensors of the block's shape, valid until the next call."""
        one, two = self._buffers[:, : block.numel()]
        return one.view(block.shape), two.view(block.shape)


def _tiles(logits: Tensor) -> Iterator[Tensor]:
    """[M, ..., C] as views [M, n, C]: a copy of sliced logits (``logits[:, :, :-1]``) would double the memory."""
    num_members, *lead, num_classes = logits.shape
    try:
        yield logits.view(num_members, math.prod(lead), num_classes)
    except RuntimeError:
        for part in logits.unbind(1):
            yield from _tiles(part)


def _select(tile: Tensor, rows: Tensor) -> Tensor:
    """``tile[:, rows]``, which is slow, by ``index_select`` of each member, which would copy a sliced tile whole."""
    result = tile.new_empty(len(tile), len(rows), tile.shape[-1])
    for member, out in zip(tile, result, strict=True):
        torch.index_select(member, 0, rows, out=out)
    return result
