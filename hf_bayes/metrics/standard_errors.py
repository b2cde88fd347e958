"""Standard errors of metrics on a finite test set. Rows are independent; the terms (tokens) of a row are not."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray

Rows = NDArray[np.int64]

NUM_RESAMPLES = 200
"""The number of bootstrap samples. The standard error of the result is then 5 % of it (1 / sqrt(2 * 200))."""


def mean_std_error(values: ArrayLike) -> float | None:
    """Return the standard error of the mean over all terms of R rows. A row without a term does not count.

    The mean is a ratio of two sums over rows, of values and of numbers of terms n_r. With s_r the sum of a row,

        s.e. = sqrt(R / (R - 1) sum_r (s_r - n_r mean)^2) / sum_r n_r,

    which is sd / sqrt(R) of the rows' means if all rows have the same number of terms.

    Args:
        values: [R, T]; NaN where a row has no further term.
    Returns:
        The standard error; None for fewer than 2 rows with a term, and if a value is not finite.
    """
    values = np.asarray(values, dtype=np.float64)
    counts, sums = (~np.isnan(values)).sum(1), np.nansum(values, 1)
    num_rows = int((counts > 0).sum())
    if num_rows < 2 or not np.isfinite(sums).all():
        return None
    residuals = sums - counts * sums.sum() / counts.sum()
    return float(np.sqrt(num_rows / (num_rows - 1) * np.square(residuals).sum()) / counts.sum())


def bootstrap_std_error(metric: Callable[[Rows], float], num_rows: int) -> float | None:
    """Return the standard deviation of a metric over bootstrap samples of the rows (Efron 1979), by scipy.

    Args:
        metric: from indices of rows, with repetitions, to the metric of these rows.
        num_rows: R.
    Returns:
        The standard error; None for fewer than 2 rows, and for a metric that is not finite.
    """
    from scipy.stats import bootstrap

    if num_rows < 2 or not np.isfinite(metric(np.arange(num_rows))):
        return None
    found = bootstrap(
        (np.arange(num_rows),),
        metric,
        n_resamples=NUM_RESAMPLES,
        vectorized=False,
        method="percentile",
        rng=np.random.default_rng(0),
    )
    return float(found.standard_error)


def auroc_std_error(inside: ArrayLike, outside: ArrayLike) -> float | None:
    """Return the standard error of the AUROC of two samples of scores (DeLong et al. 1988).

    For each score outside take the share of the scores inside that are below it, and for each score inside the share of
    the scores outside that are above it (ties count one half). The variance of the AUROC is the sum of the variances
    of the two means.

    Args:
        inside: [m] scores in distribution.
        outside: [n] scores out of distribution.
    Returns:
        The standard error; None if there are fewer than 2 scores of one kind.
    """
    from scipy.stats import rankdata

    inside, outside = np.asarray(inside, dtype=np.float64), np.asarray(outside, dtype=np.float64)
    m, n = len(inside), len(outside)
    if min(m, n) < 2:
        return None
    ranks = rankdata(np.concatenate([inside, outside]))
    below = (ranks[m:] - rankdata(outside)) / m
    above = 1 - (ranks[:m] - rankdata(inside)) / n
    return float(np.sqrt(below.var(ddof=1) / n + above.var(ddof=1) / m))
