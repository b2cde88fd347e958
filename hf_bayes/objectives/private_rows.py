"""The sums over processes that keep their rows to themselves (``private_rows``; stratified sampling).

Process p of P has n_p of the N rows. For an update it draws K batches of b of its rows. With l_pj the log-likelihood of
its batch j, the processes compute

    l_j = sum_p (n_p / b) l_pj,   j = 1 .. K

Each l_j is an unbiased estimate of the log-likelihood of all rows, and the K sums are independent, because processes
draw independently of each other. So the test of ``penalty`` uses them as it uses the K batches of one process. The
variance between them is the sum over processes of (n_p / b)^2 times the variance between the batches of p, with K - 1
degrees of freedom for any sizes. (A sum of P separate estimates of a variance would have another number of degrees of
freedom for each mixture of sizes.) The processes exchange one sum of K numbers for each chain.

If no row comes twice in an update, the mean of the K batches of a process has the variance that they show times
f_p = 1 - K b / n_p. But the test has one factor for all processes, f = 1 - K b P / N. So process p multiplies the
deviations of its batches from their mean by sqrt(f_p / f).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class PrivateRows:
    """The rows of one process, as one stratum of all data.

    Attributes:
        sizes: n_p, the numbers of rows in the order of the processes.
        rank: p, the number of this process, from 0.
        batch_size, num_batches: b and K, the same in all processes.
        disjoint: True if no row comes twice in an update.
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
        """The number of rows of all processes, N."""
        return sum(self.sizes)

    @property
    def weight(self) -> float:
        """The number of rows of this process over the mean number: the weight of its batches in a sum."""
        return self.sizes[self.rank] * len(self.sizes) / self.num_rows

    @property
    def deviation_scale(self) -> float:
        """The factor sqrt(f_p / f) of deviations; 1 if batches are drawn independently of each other."""
        if not self.disjoint:
            return 1.0
        drawn = self.batch_size * self.num_batches
        of_all = 1 - drawn * len(self.sizes) / self.num_rows
        return math.sqrt((1 - drawn / self.sizes[self.rank]) / of_all) if of_all > 0 else 1.0

    def contribution(self, log_lik: Tensor) -> Tensor:
        """Return the terms [M, K] of this process in the sums, from the log-likelihoods [M, K] of its batches."""
        mean = log_lik.mean(1, keepdim=True)
        return self.weight * (mean + self.deviation_scale * (log_lik - mean))
