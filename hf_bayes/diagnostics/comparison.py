"""The difference between the mean NLLs of two predictions of the same held-out rows, and its standard error."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from hf_bayes.core.types import RowScores


def row_scores(nll: ArrayLike, terms: ArrayLike) -> RowScores:
    """Sum the NLLs of likelihood terms over each row.

    Args:
        nll: [n] nats per term, in the order of the rows.
        terms: [R] the number of terms in each row; they sum to n.
    """
    nll, counts = np.asarray(nll, dtype=np.float64), np.asarray(terms, dtype=np.int64)
    sums = np.bincount(np.repeat(np.arange(len(counts)), counts), nll, minlength=len(counts))
    return RowScores(sums.astype(np.float64), counts)


def difference_std_error(one: RowScores, other: RowScores) -> float | None:
    """Return the standard error of the difference between two mean NLLs per term, paired by row.

    With d_r the difference of row r and n_r its number of terms, the difference is D = sum_r d_r / sum_r n_r, a ratio
    of two sums over R independent rows. Its standard error is sqrt(R / (R - 1) sum_r (d_r - D n_r)^2) / sum_r n_r.
    Terms of one row (tokens of one text) depend on each other, so the error is computed from rows.

    Returns:
        The standard error in nats per term. None if there are fewer than 2 rows, if the two predictions have different
        rows, or if an NLL is not finite.
    """
    counts = one.terms
    if not np.array_equal(counts, other.terms) or np.count_nonzero(counts) < 2:
        return None
    differences = one.nll - other.nll
    mean = differences.sum() / counts.sum()
    num_rows = np.count_nonzero(counts)
    with np.errstate(invalid="ignore"):
        squares = np.square(differences - mean * counts).sum()
    error = float(np.sqrt(num_rows / (num_rows - 1) * squares) / counts.sum())
    return error if np.isfinite(error) else None
