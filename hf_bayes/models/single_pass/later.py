"""Columns that are computed when they are read, and only at the rows that are read.

A classifier reads one token of the last block, and generation reads the last token of a prompt. Linear layers, norms,
activations and sums act on each row (token) alone. So a choice of rows behind them is a choice of rows before them, and
the tangents of all other rows are never computed. Attention reads all rows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Choose = Callable[[Tensor], Tensor]
"""A choice or an arrangement of rows: it maps [..., n] to [..., n] and leaves the last dimension as it is."""


class Later:
    """Columns [S, ..., n].

    Args:
        make: a choice of rows -> the columns [S, ..., n] at these rows.
    """

    def __init__(self, make: Callable[[Choose], Tensor]) -> None:
        self._make: Callable[[Choose], Tensor] | None = make
        self._value: Tensor | None = None
        self._last: tuple[Choose, Later] | None = None

    @property
    def value(self) -> Tensor:
        """The columns at all rows."""
        if self._value is None:
            assert self._make is not None
            self._value, self._make = self._make(everything), None  # what it was made of is no longer held
        return self._value

    def at(self, choose: Choose) -> Later:
        """Return the columns at chosen rows; a branch and its skip connection share them."""
        if choose is everything:
            return self
        if self._last is None or self._last[0] is not choose:
            self._last = choose, Later(lambda then: self._chosen(choose, then))
        return self._last[1]

    def _chosen(self, first: Choose, then: Choose) -> Tensor:
        choose = first if then is everything else lambda part: then(first(part))
        if self._make is None:  # the value has been read in the meantime
            return rows_of(self.value, choose)
        return self._make(choose)


def everything(part: Tensor) -> Tensor:
    """Return all rows."""
    return part


def rows_of(columns: Tensor, choose: Choose) -> Tensor:
    """Return the columns [S, ..., n] at chosen rows."""
    return columns if choose is everything else torch.vmap(choose)(columns)
