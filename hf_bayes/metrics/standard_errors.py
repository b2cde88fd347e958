"""Standard errors of metrics on a finite test set. Rows are independent; the terms (tokens) of a row are not."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray

Rows = NDArray[np.int64]

NUM_RESAMPLES = 200
"""The number of bootstrap samples. The standard error of the result is then 5 % of it (1 / sqrt(2 * 200))."""


def mean_std_error(values: ArrayLike) -> float | None:
    """Return the standard error of the mean over all terms, from the means of R rows.

    Args:
        values: [R, T], T terms in each row.
    Returns:
        sd / sqrt(R); None for fewer than 2 rows, and if a value is not finite.
    """
    means = np.asarray(values, dtype=np.float64).mean(1)
    if len(means) < 2 or not np.isfinite(means).all():
        return None
    return float(means.std(ddof=1) / np.sqrt(len(means)))


def bootstrap_std_error(metric: Callable[[Rows], float], num_rows: int) -> float | None:
    """Return the standard deviation of a metric over bootstrap samples of the rows (Efron 1979), by scipy.

    Args:
        metric: from indices of rows, with repetitions, to the metric of these rows.
        num_rows: R.
    Returns:
        The standard error; None for fewer than 2 rows.
    """
    from scipy.stats import bootstrap

    if num_rows < 2:
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
