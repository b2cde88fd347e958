"""P-values of a risk."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hf_bayes.decide.risk_tests import binomial_p_value, hoeffding_bentkus_p_value, losses_of, p_value, rows_needed

LIMIT, NUM_ROWS, DRAWS = 0.1, 80, 4000


def false_alarms(test, level: float = 0.1) -> float:
    """Return the share of p-values below ``level`` among data sets whose risk equals the limit."""
    rng = np.random.default_rng(0)
    return float(np.mean([test((rng.random(NUM_ROWS) < LIMIT).astype(float), LIMIT) <= level for _ in range(DRAWS)]))


@pytest.mark.parametrize("test", [binomial_p_value, hoeffding_bentkus_p_value])
def test_a_risk_at_the_limit_is_seldom_accepted(test) -> None:
    assert false_alarms(test) < 0.1 + 4 * math.sqrt(0.09 / DRAWS)  # 4 standard errors


def test_a_p_value_of_fewer_errors_than_seen_is_caught() -> None:
    def strict(losses: np.ndarray, limit: float) -> float:  # the broken twin: P(X < k) in place of P(X <= k)
        return (
            binomial_p_value(np.r_[losses[:0], np.zeros(len(losses))], limit)
            if not losses.sum()
            else float(
                binomial_p_value(
                    np.r_[np.ones(int(losses.sum()) - 1), np.zeros(len(losses) - int(losses.sum()) + 1)], limit
                )
            )
        )

    assert false_alarms(strict) > 0.1 + 4 * math.sqrt(0.09 / DRAWS)


def test_the_bound_is_never_below_the_exact_value() -> None:
    for errors in range(0, NUM_ROWS, 3):
        losses = np.r_[np.ones(errors), np.zeros(NUM_ROWS - errors)]
        assert hoeffding_bentkus_p_value(losses, LIMIT) >= binomial_p_value(losses, LIMIT) - 1e-12
        assert p_value(losses, LIMIT) == binomial_p_value(losses, LIMIT)
    assert p_value(np.full(50, 0.05), LIMIT) == hoeffding_bentkus_p_value(np.full(50, 0.05), LIMIT)
    assert binomial_p_value([], LIMIT) == hoeffding_bentkus_p_value([], LIMIT) == 1


def test_the_rows_needed_are_the_fewest_that_can_pass() -> None:
    for limit, level in ((0.1, 0.1), (0.01, 0.05)):
        count = rows_needed(limit, level)
        assert binomial_p_value(np.zeros(count), limit) <= level < binomial_p_value(np.zeros(count - 1), limit)


def test_losses_outside_the_unit_interval_are_refused() -> None:
    with pytest.raises(ValueError, match=r"errors must be in \[0, 1\], got values in \[-1, 2\]"):
        losses_of("errors", [-1.0, 2.0])
