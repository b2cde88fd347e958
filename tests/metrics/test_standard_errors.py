from __future__ import annotations

import math

import numpy as np
import pytest

from hf_bayes.metrics import ood_auroc, risk_coverage
from hf_bayes.metrics.standard_errors import auroc_std_error, bootstrap_std_error, mean_std_error

RUNS = 400
# The standard deviation over 400 runs has a relative error of 1 / sqrt(800) = 0.035: four of these.
TOLERANCE = 0.14


def auroc(inside: np.ndarray, outside: np.ndarray) -> float:
    return ood_auroc(np.concatenate([inside, outside]), np.repeat([0, 1], [len(inside), len(outside)]))


def test_tokens_of_one_row_are_not_independent() -> None:
    rng = np.random.default_rng(0)
    samples = rng.normal(size=(RUNS, 50, 1)) + 0.1 * rng.normal(size=(RUNS, 50, 8))  # a row has a level of its own
    spread = samples.mean((1, 2)).std(ddof=1)
    assert np.mean([mean_std_error(sample) for sample in samples]) == pytest.approx(spread, rel=TOLERANCE)
    twin = np.mean([sample.std(ddof=1) / math.sqrt(sample.size) for sample in samples])  # every token counts as a row
    assert twin != pytest.approx(spread, rel=TOLERANCE)


def test_auroc_error_is_the_spread_over_test_sets() -> None:
    rng = np.random.default_rng(1)
    # rounded: ties count one half
    sets = [(rng.normal(0, 1, 40).round(1), rng.normal(1, 1, 90).round(1)) for _ in range(RUNS)]
    spread = np.std([auroc(*pair) for pair in sets], ddof=1)
    assert np.mean([auroc_std_error(*pair) for pair in sets]) == pytest.approx(spread, rel=TOLERANCE)
    twin = np.mean([auroc_std_error(np.tile(a, 4), np.tile(b, 4)) for a, b in sets])  # copies are no new rows
    assert twin == pytest.approx(spread / 2, rel=TOLERANCE)


def test_bootstrap_error_is_the_spread_over_test_sets() -> None:
    rng = np.random.default_rng(2)

    def sample() -> tuple[np.ndarray, np.ndarray]:
        uncertainty = rng.random(80)
        return uncertainty, (rng.random(80) < uncertainty).astype(float)

    spread = np.std([risk_coverage(*sample()).aurc for _ in range(RUNS)], ddof=1)
    errors = []
    for uncertainty, loss in (sample() for _ in range(15)):
        error = bootstrap_std_error(lambda rows, u=uncertainty, e=loss: risk_coverage(u[rows], e[rows]).aurc, 80)
        errors.append(error)
    # a bootstrap error varies by 15 % with the sample: four standard errors of the mean of 15
    assert np.mean(errors) == pytest.approx(spread, rel=4 * 0.15 / math.sqrt(15))
    assert bootstrap_std_error(lambda rows: float(rows.mean()), 80) == bootstrap_std_error(lambda rows: rows.mean(), 80)


def test_one_row_has_no_standard_error() -> None:
    assert mean_std_error([[1.0, 2.0]]) is None
    assert mean_std_error([[1.0], [math.inf]]) is None
    assert auroc_std_error([0.0], [1.0, 2.0]) is None
    assert bootstrap_std_error(lambda rows: 0.0, 1) is None


def test_rows_without_a_term_do_not_count() -> None:
    rows, empty = [[1.0, 2.0], [4.0, math.nan]], [math.nan, math.nan]
    assert mean_std_error([rows[0], empty]) is None
    assert mean_std_error([empty, empty]) is None
    assert mean_std_error([empty, *rows, empty]) == mean_std_error(rows)


def test_rows_of_unequal_length_weigh_by_their_terms() -> None:
    rng = np.random.default_rng(3)

    def sample() -> np.ndarray:
        counts = rng.integers(1, 9, size=(50, 1))
        values = counts / 4 + rng.normal(size=(50, 8))  # the level of a row depends on its length
        return np.where(np.arange(8) < counts, values, np.nan)

    samples = [sample() for _ in range(RUNS)]
    spread = np.std([np.nanmean(one) for one in samples], ddof=1)
    assert np.mean([mean_std_error(one) for one in samples]) == pytest.approx(spread, rel=TOLERANCE)
    twin = np.mean([np.nanmean(one, 1).std(ddof=1) / math.sqrt(50) for one in samples])  # rows of equal weight
    assert twin != pytest.approx(spread, rel=TOLERANCE)


def test_a_bootstrap_of_infinite_figures_is_undefined() -> None:
    assert bootstrap_std_error(lambda rows: math.inf, 4) is None
