"""grad log p(D | theta), from all rows of the data or from some of them, and squares of it that some do not bias.

Of R rows, two halves of n each are drawn without replacement. With g_r the gradient of a row, G = sum_r g_r and
G_i = (R / n) sum_{r in half i} g_r, every symmetric A has

    G' A G = E[ G_1' A G_2 + n / (2 R) (G_1 - G_2)' A (G_1 - G_2) ]:

halves that share no row are anticorrelated, Cov(G_1, G_2) = -R S with S the covariance of the rows, and the
second term is R tr(A S) in expectation. The square of one estimate would be too large by (R / n - 1) R tr(A S), which
at a MAP is most of it. Where the halves are all rows, the formula is G' A G.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_bayes.core.rng import generator

LEAST_ROWS = 128
"""Rows up to which all are looked at."""

SHARE = 1 / 16
"""Of more rows, the part that is."""

SMALL = 1 << 14
"""d up to which all rows are: the standard error of the squared displacement is about R / (n sqrt(d)) at most."""


@dataclass(frozen=True, eq=False)
class Slope:
    """grad log p(D | theta).

    Attributes:
        halves: [2, d] estimates, from either half of the rows; the same twice where all rows were looked at.
        num_rows: in both halves together.
        num_data_rows: R.
    """

    halves: Tensor
    num_rows: int
    num_data_rows: int

    @property
    def mean(self) -> Tensor:
        """[d]"""
        return self.halves.mean(0)

    def scaled(self, factor: float) -> Slope:
        """That of factor * log p(D | theta)."""
        return Slope(factor * self.halves, self.num_rows, self.num_data_rows)

    def square(self, offset: Tensor, product: Callable[[Tensor], Tensor]) -> float:
        """(G + offset)' A (G + offset) without bias, so that it may be negative; ``product`` maps rows v to A v."""
        first, second = self.halves + offset
        apart = first - second
        along, across = product(torch.stack([second, apart]))
        return float(first @ along + self.num_rows / (4 * self.num_data_rows) * (apart @ across))


def halves(num_rows: int, dim: int, seed: int) -> list[list[int]] | None:
    """The rows of either half, in order; None if all rows are to be looked at."""
    size = max(LEAST_ROWS, int(SHARE * num_rows)) // 2
    if dim <= SMALL or num_rows <= 2 * size:
        return None
    drawn = torch.randperm(num_rows, generator=generator(seed, "slope"))
    return [sorted(half.tolist()) for half in drawn[: 2 * size].split(size)]
