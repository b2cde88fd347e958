"""The largest width of a posterior whose held-out loss is not measurably above the loss of its mean."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from hf_bayes.core.types import RowScores
from hf_bayes.diagnostics.comparison import difference_std_error

FACTOR = 4.0
"""The ratio of two widths of the search, until one of them passes and one fails."""

INDIFFERENT = 1e-4
"""A difference in nats per term that passes, however small its standard error. So a width that is small enough
passes with any number of rows."""


class WidthCheck(NamedTuple):
    """The loss at a width, compared with the loss at width 0 on the same rows.

    Attributes:
        width: a factor of the standard deviations.
        difference: the loss at this width minus the loss at width 0, in nats per likelihood term.
        std_error: the standard error of the difference, paired by row.
        passes: True if the difference is within the tolerance.
    """

    width: float
    difference: float
    std_error: float
    passes: bool


def check_width(width: float, found: RowScores, point: RowScores, *, tolerance: float) -> WidthCheck:
    """Compare the scores at a width with those at width 0.

    A difference passes up to ``tolerance`` standard errors of its own. Both predictions see the same rows, so the
    standard error is that of the differences of rows, which is far below that of either loss. A loss that is not
    finite fails.
    """
    difference = float((found.nll - point.nll).sum() / point.terms.sum())
    error = difference_std_error(found, point)
    if error is None or not math.isfinite(difference):
        return WidthCheck(width, math.inf, math.inf, False)
    return WidthCheck(width, difference, error, difference <= max(tolerance * error, INDIFFERENT))


def largest_width(check: Callable[[float], WidthCheck], start: float, *, num_checks: int) -> list[WidthCheck]:
    """Return the checks of a bisection for the largest width that passes.

    From ``start`` the width grows or shrinks by ``FACTOR`` until one width passes and one fails. Then the logarithm of
    the width is bisected. Every check costs a pass over held-out rows.

    Args:
        num_checks: the number of checks.
    """
    low, high, width, checks = 0.0, math.inf, start, []
    for _ in range(num_checks):
        found = check(width)
        checks.append(found)
        low, high = (width, high) if found.passes else (low, width)
        width = low * FACTOR if high == math.inf else high / FACTOR if low == 0 else math.sqrt(low * high)
    return checks
