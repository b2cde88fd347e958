from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import norm

from hf_bayes.metrics.regression import deviation_bins, expected_normalized_calibration_error, interval_coverage


def errors(count: int, *, scale: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Return errors and their predicted deviations, which are too small by a factor ``scale``."""
    rng = np.random.default_rng(0)
    deviation = rng.uniform(0.5, 2, count)
    return scale * deviation * rng.normal(size=count), deviation


def test_coverage_counts_labels_between_two_quantiles() -> None:
    label = np.random.default_rng(1).normal(1, 3, size=500)
    levels = [0.5, 0.9, 0.95]
    ends = [norm.interval(level, loc=1, scale=2) for level in levels]
    expected = [((low <= label) & (label <= high)).mean() for low, high in ends]
    assert interval_coverage(norm.cdf(label, loc=1, scale=2), levels).tolist() == expected
    assert interval_coverage([0.5, 0.99], 0.9) == 0.5


def test_bins_hold_the_examples_in_the_order_of_deviation() -> None:
    bins = deviation_bins([1.0, -2.0, 4.0, 3.0, 1.0], [2.0, 1.0, 5.0, 4.0, 1.0], num_bins=2)
    assert bins.num_examples.tolist() == [3, 2]
    assert bins.predicted == pytest.approx([math.sqrt(6 / 3), math.sqrt(41 / 2)])
    assert bins.observed == pytest.approx([math.sqrt(6 / 3), math.sqrt(25 / 2)])
    assert deviation_bins([1.0], [2.0]).num_examples.tolist() == [1]


@pytest.mark.parametrize("num_deviations", [1, 3])
def test_bins_of_equal_deviations_have_no_order(num_deviations: int) -> None:
    error, deviation = errors(100)[0], np.arange(100) % num_deviations + 1.0
    bins = deviation_bins(error, deviation)
    for order in (np.argsort(np.abs(error)), np.random.default_rng(1).permutation(100)):
        assert deviation_bins(error[order], deviation[order]).observed == pytest.approx(bins.observed, rel=1e-12)
    if num_deviations == 1:
        root_mean_square = math.sqrt(np.square(error).mean())
        assert expected_normalized_calibration_error(error, deviation) == pytest.approx(abs(1 - root_mean_square))


def test_right_deviations_have_an_error_of_sampling_alone() -> None:
    # a root mean square of n = 2000 errors has the relative error 1 / sqrt(2 n); the mean of its absolute value
    # over 10 bins is sqrt(2 / pi) of it, give or take 0.6 / sqrt(10) of it: four of these
    sampling = 1 / math.sqrt(4000)
    assert expected_normalized_calibration_error(*errors(20_000)) == pytest.approx(0.8 * sampling, abs=0.76 * sampling)
    assert expected_normalized_calibration_error(*errors(20_000, scale=2)) == pytest.approx(1, abs=4 * sampling)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: interval_coverage([1.2], 0.5), r"below must be probabilities in \[0, 1\], got values in \[1.2, 1.2\]"),
        (lambda: interval_coverage([math.nan], 0.5), "1 of 1 values of below are not finite"),
        (lambda: deviation_bins([1.0], [1.0, 2.0]), "got lengths error 1, deviation 2"),
        (lambda: deviation_bins([1.0], [1.0], num_bins=0), "num_bins must be at least 1, got 0"),
        (lambda: expected_normalized_calibration_error([1.0], [0.0]), "deviation must be positive"),
    ],
)
def test_numbers_without_a_meaning_are_refused(call: object, message: str) -> None:
    assert callable(call)
    with pytest.raises(ValueError, match=message):
        call()
