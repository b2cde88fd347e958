"""The promise of a fitted threshold, on data whose error rates are known."""

from __future__ import annotations

import contextlib
import math

import numpy as np
import pytest

from hf_bayes.decide import threshold
from hf_bayes.decide.threshold import fit_threshold

PROMISE = {"error_rate": 0.1, "failure_rate": 0.1, "measure": "total"}
DRAWS = 300


def drawn(rng: np.random.Generator, num_rows: int = 2000) -> tuple[np.ndarray, np.ndarray]:
    """Return uncertainties u in [0, 1], and errors of probability u / 2: those below t have the error rate t / 4."""
    values = rng.random(num_rows)
    return values, (rng.random(num_rows) < values / 2).astype(float)


def broken_promises() -> float:
    """Return the share of data sets whose threshold has a true error rate above the promise."""
    rng, broken = np.random.default_rng(0), 0
    for _ in range(DRAWS):
        with contextlib.suppress(ValueError):  # a refusal is no broken promise
            broken += fit_threshold(*drawn(rng), **PROMISE).threshold / 4 > 0.1
    return broken / DRAWS


def test_a_promise_fails_no_more_often_than_stated() -> None:
    assert broken_promises() < 0.1 + 4 * math.sqrt(0.09 / DRAWS)  # 4 standard errors


def test_a_threshold_of_the_empirical_error_rate_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threshold, "p_value", lambda losses, limit: float(losses.mean() > limit))
    assert broken_promises() > 0.1 + 4 * math.sqrt(0.09 / DRAWS)


def test_most_of_what_could_be_answered_is_answered() -> None:
    found = fit_threshold(*drawn(np.random.default_rng(1), 20_000), **PROMISE)
    assert 0.34 < found.threshold <= 0.42  # 0.4 has an error rate of 0.1; the grid has steps of 0.02
    assert found.answered == pytest.approx(found.threshold, abs=0.02)
    assert found.heldout_error_rate <= 0.1
    assert not found.abstains(found.threshold)
    assert found.abstains(found.threshold + 1e-9)
    assert found.abstains(math.nan)


def test_too_few_rows_are_refused_with_a_number_that_would_do() -> None:
    with pytest.raises(ValueError, match=r"40 held-out rows are too few .* give at least 89 rows"):
        fit_threshold(np.arange(40.0), np.zeros(40), **PROMISE)
    assert fit_threshold(np.arange(89.0), np.zeros(89), **PROMISE).num_rows == 89


def test_a_promise_that_no_threshold_keeps_is_refused() -> None:
    values = np.random.default_rng(0).random(400)
    with pytest.raises(
        ValueError, match=r"no threshold of total keeps an error rate of 0\.1 .* error rate is 1 on all"
    ):
        fit_threshold(values, np.ones(400), **PROMISE)
    with pytest.raises(ValueError, match="error_rate must be a number between 0 and 1, got 5"):
        fit_threshold(values, np.ones(400), error_rate=5, measure="total")
