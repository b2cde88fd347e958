"""The number of likelihood terms, and the factor between the log-likelihood of an update and that of all data."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class DataScale(NamedTuple):
    """The size of the training data and of an update.

    Attributes:
        num_data: N, the number of terms that the data count as, see docs/scale.md.
        num_rows: the number of rows of the data of all processes; None for a stream.
        num_terms: the number of likelihood terms in these rows; None for a stream.
        rows_per_update: R, the number of rows of an update for each chain, over all processes that share it.
    """

    num_data: float
    num_rows: int | None
    num_terms: int | None
    rows_per_update: int

    @property
    def update_fraction(self) -> float | None:
        """The share of the rows that an update sees; None for a stream."""
        return None if self.num_rows is None else self.rows_per_update / self.num_rows

    def factor(self, terms: Tensor) -> float | Tensor:
        """Return the factor that makes the log-likelihood of an update stand for all data.

        It is (rows of the data / rows of the update) * N / terms of the data, unbiased for any mixture of lengths. The
        number of rows of a stream is unknown. Its factor is N / ``terms`` [M], terms of the update: a ratio estimator.
        """
        if self.num_terms is None or self.num_rows is None:
            return self.num_data / terms.clamp_min(1)
        return self.num_rows / self.rows_per_update * (self.num_data / self.num_terms)
