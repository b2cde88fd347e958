"""Rows that stay with their processes: what each process adds to an estimate of all data (stratified sampling).

Process p of P has n_p of N rows and draws K batches of b of them for an update. With l_pj of batch j the log-likelihood

    l_j = sum_p (n_p / b) l_pj,   j = 1 .. K

is an unbiased estimate of all data's. Processes draw independently of each other, so the l_j are as independent as the
batches of one process, and the variance between them is the sum over processes of (n_p / b)^2 times the variance within
p. A test of K batches takes them as they are: the estimated variance of their mean has K - 1 degrees of freedom, which
the series of ``penalty`` is made for, whatever the sizes; summing P estimates would leave it a number of its own for
every mixture of sizes. The processes exchange only one sum of K numbers a chain.

Where no row comes twice in an update, the mean of a process's K batches has f_p = 1 - K b / n_p of the variance that
they show. The test multiplies by one factor, f = 1 - K b P / N; so p brings in the deviations of its batches from their
mean times sqrt(f_p / f).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Stratum:
    """The rows of one process, as one stratum of all data.

    Attributes:
        sizes: n_p, in the order of the processes.
        rank: p.
        batch_size, num_batches: b and K, the same everywhere.
        disjoint: whether no row comes twice in an update.
    """

    sizes: tuple[int, ...]
    rank: int
    batch_size: int
    num_batches: int
    disjoint: bool

    def __post_init__(self) -> None:
        rows = self.batch_size * (self.num_batches if self.disjoint else 1)
        for rank, size in enumerate(self.sizes):
            if size < rows:
                raise ValueError(
                    f"process {rank} has {size} rows of its own and cannot draw {rows} different ones: lower "
                    "per_device_train_batch_size or gradient_accumulation_steps"
                )

    @property
    def num_rows(self) -> int:
        """N"""
        return sum(self.sizes)

    @property
    def weight(self) -> float:
        """n_p over the mean of all: what the log-likelihood of a batch here counts beside that of another process."""
        return self.sizes[self.rank] * len(self.sizes) / self.num_rows

    @property
    def deviation_scale(self) -> float:
        """sqrt(f_p / f); 1 where batches are drawn independently of each other."""
        if not self.disjoint:
            return 1.0
        drawn = self.batch_size * self.num_batches
        of_all = 1 - drawn * len(self.sizes) / self.num_rows
        return math.sqrt((1 - drawn / self.sizes[self.rank]) / of_all) if of_all > 0 else 1.0

    def contribution(self, log_lik: Tensor) -> Tensor:
        """Return what this process adds to the log-likelihoods of all, from those of the batches here [M, K]."""
        mean = log_lik.mean(1, keepdim=True)
        return self.weight * (mean + self.deviation_scale * (log_lik - mean))
