"""grad log p(D | theta) from all rows of the data or from a part of them, and unbiased squares of it.

From R rows, two halves of n rows each are drawn without replacement. With g_r the gradient of a row, G = sum_r g_r and
G_i = (R / n) sum_{r in half i} g_r, every symmetric A has

    G' A G = E[ G_1' A G_2 + n / (2 R) (G_1 - G_2)' A (G_1 - G_2) ].

Halves without a common row are anticorrelated, Cov(G_1, G_2) = -R S with S the covariance of the rows, and the
expectation of the second term is R tr(A S). The square of one estimate would be too large by (R / n - 1) R tr(A S),
which is most of it at a MAP. If the halves contain all rows, the formula is G' A G.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_bayes.core.rng import generator

LEAST_ROWS = 128
"""The smallest number of rows to evaluate. Smaller data sets are evaluated whole."""

SHARE = 1 / 16
"""The share of a larger data set that is evaluated."""

SMALL = 1 << 14
"""The largest d for which all rows are evaluated.

The standard error of the squared displacement is at most about R / (n sqrt(d)).
"""


@dataclass(frozen=True, eq=False)
class GradientEstimate:
    """The estimated grad log p(D | theta).

    Attributes:
        half_batch_gradients: [2, d] the estimates from the two halves of the rows; equal if all rows were evaluated.
        num_rows: number of rows in both halves together.
        num_data_rows: R.
    """

    half_batch_gradients: Tensor
    num_rows: int
    num_data_rows: int

    @property
    def mean(self) -> Tensor:
        """The mean of both estimates, [d]."""
        return self.half_batch_gradients.mean(0)

    def scaled(self, factor: float) -> GradientEstimate:
        """Return the gradient of factor * log p(D | theta)."""
        return GradientEstimate(factor * self.half_batch_gradients, self.num_rows, self.num_data_rows)

    def square(self, offset: Tensor, product: Callable[[Tensor], Tensor]) -> float:
        """Return an unbiased estimate of (G + offset)' A (G + offset), which may be negative.

        Args:
            offset: [d]
            product: a function that maps rows v to A v.
        """
        first, second = self.half_batch_gradients + offset
        difference = first - second
        of_second, of_difference = product(torch.stack([second, difference]))
        return float(first @ of_second + self.num_rows / (4 * self.num_data_rows) * (difference @ of_difference))


def draw_half_batches(num_rows: int, dim: int, seed: int) -> list[list[int]] | None:
    """Return the row numbers of both halves, sorted; None if all rows are to be evaluated."""
    size = max(LEAST_ROWS, int(SHARE * num_rows)) // 2
    if dim <= SMALL or num_rows <= 2 * size:
        return None
    drawn = torch.randperm(num_rows, generator=generator(seed, "slope"))
    return [sorted(half.tolist()) for half in drawn[: 2 * size].split(size)]
