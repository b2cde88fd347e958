"""A threshold of an uncertainty below which answers keep a promised error rate (learn then test).

The promise: with probability at least ``1 - failure_rate`` over the held-out rows, the error rate of new answered rows
is at most ``error_rate``. It holds for every model, every measure and every number of rows, if the held-out rows are
independent draws from the law of the new rows.

Method: Angelopoulos et al. 2021, "Learn then test", with fixed-sequence testing. Every ``_GRID_STRIDE``-th row gives
the candidates: its quantiles of the uncertainty. The other rows test them, from the most cautious candidate on, and the
last candidate before the first failure is the threshold. With thresholds from the tested rows themselves, the tests
would not be independent of what they test. Departure from the paper: the risk is the error rate *among answered rows*,
so each test uses answered rows only. Given their number, these are independent draws from the law of answered rows.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hf_bayes.core.number_checks import is_number
from hf_bayes.decide.risk_tests import losses_of, p_value, rows_needed
from hf_bayes.metrics.functions import require_same_length, vector_of
from hf_bayes.posteriors.abstention import Abstention

_GRID_STRIDE = 4
"""One row in four gives candidates. Quantiles need fewer rows than tests do."""
_NUM_CANDIDATES = 50
"""The largest number of candidates: thresholds at steps of 2 % of the rows."""
_HEADROOM = 3
"""The first candidate answers this many times the rows that a test without an error needs, so that one error is not
the end of the sequence."""


def fit_threshold(
    uncertainty: ArrayLike,
    errors: ArrayLike,
    *,
    error_rate: float,
    measure: str,
    failure_rate: float = 0.1,
) -> Abstention:
    """Return the largest threshold found whose answered rows keep the error rate.

    Args:
        uncertainty: [N] of held-out rows, higher means less sure. Their order must be random.
        errors: [N] 1 if the answer was wrong, else 0; or any loss in [0, 1], whose mean is then limited.
        error_rate: the largest error rate among answered rows.
        measure: the name of the uncertainty, one of ``posteriors.abstention.MEASURES``.
        failure_rate: the largest probability that the promise does not hold.
    Raises:
        ValueError: for too few rows (with the number that would do), and if no threshold keeps the promise.
    """
    for name, value in (("error_rate", error_rate), ("failure_rate", failure_rate)):
        if not is_number(value) or not 0 < value < 1:
            raise ValueError(f"{name} must be a number between 0 and 1, got {value!r}: give for example 0.1")
    values, losses = vector_of("uncertainty", uncertainty), losses_of("errors", errors)
    require_same_length(uncertainty=values, errors=losses)
    is_candidate = np.arange(len(values)) % _GRID_STRIDE == 0
    tested, tested_losses = values[~is_candidate], losses[~is_candidate]
    _require_enough_rows(len(values), len(tested), error_rate, failure_rate)
    passed = None
    for candidate in _candidates(values[is_candidate], len(tested), rows_needed(error_rate, failure_rate)):
        if p_value(tested_losses[tested <= candidate], error_rate) > failure_rate:
            break
        passed = float(candidate)
    if passed is None:
        raise ValueError(_no_threshold(tested, tested_losses, error_rate, failure_rate, measure))
    answered = tested <= passed
    return Abstention(
        measure=measure,
        threshold=passed,
        error_rate=error_rate,
        failure_rate=failure_rate,
        num_rows=len(values),
        answered=float(answered.mean()),
        heldout_error_rate=float(tested_losses[answered].mean()),
    )


def _candidates(values: NDArray[np.float64], num_tested: int, num_needed: int) -> NDArray[np.float64]:
    """Return increasing thresholds, of which the first answers ``_HEADROOM`` times the rows that a test needs."""
    first = min(2 / 3, _HEADROOM * num_needed / num_tested)
    levels = np.linspace(first, 1, max(2, math.ceil((1 - first) * _NUM_CANDIDATES) + 1))
    return np.unique(np.quantile(values, levels, method="higher"))


def _require_enough_rows(num_rows: int, num_tested: int, error_rate: float, failure_rate: float) -> None:
    # with fewer rows the first candidate, which answers two thirds of them at most, could not pass
    needed = _HEADROOM * rows_needed(error_rate, failure_rate)
    if num_tested < needed:
        enough = math.ceil(needed * _GRID_STRIDE / (_GRID_STRIDE - 1)) + 1
        raise ValueError(
            f"{num_rows} held-out rows are too few for an error rate of {error_rate:g} with a failure rate of "
            f"{failure_rate:g}: give at least {enough} rows, or allow a higher error rate"
        )


def _no_threshold(
    tested: NDArray[np.float64], losses: NDArray[np.float64], error_rate: float, failure_rate: float, measure: str
) -> str:
    surest = losses[tested <= np.median(tested)]
    return (
        f"no threshold of {measure} keeps an error rate of {error_rate:g} with a failure rate of {failure_rate:g}: the "
        f"error rate is {losses.mean():.3g} on all held-out rows and {surest.mean():.3g} on the surer half of them. "
        "Allow a higher error rate, give more rows, or take another measure"
    )
