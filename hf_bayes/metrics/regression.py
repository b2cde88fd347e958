"""Scores of predicted numbers and of their standard deviations, computed from one number per example."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from hf_bayes.metrics.functions import Array, require_same_length, vector_of

NUM_BINS = 10


class DeviationBins(NamedTuple):
    """Predicted and observed errors in bins of equally many examples, in the order of the predicted deviation.

    Attributes:
        num_examples: [B] the number of examples in each bin.
        predicted: [B] the root of the mean predicted variance.
        observed: [B] the root mean squared error.
    """

    num_examples: Array
    predicted: Array
    observed: Array


def interval_coverage(below: ArrayLike, level: ArrayLike) -> Array:
    """Return the share of labels within the central predictive interval of each level.

    The label is within it if its predictive probability of smaller numbers is between (1 - level) / 2 and
    (1 + level) / 2. A calibrated prediction has a coverage equal to the level (Kuleshov, Fenner and Ermon 2018).

    Args:
        below: [N] the predictive probability of numbers below the label (the probability integral transform).
        level: [L] levels between 0 and 1.
    """
    below = vector_of("below", below)
    if below.min() < 0 or below.max() > 1:
        raise ValueError(f"below must be probabilities in [0, 1], got values in [{below.min():g}, {below.max():g}]")
    covered: Array = (np.abs(2 * below - 1) <= np.asarray(level, dtype=np.float64)[..., None]).mean(-1)
    return covered


def deviation_bins(error: ArrayLike, deviation: ArrayLike, *, num_bins: int = NUM_BINS) -> DeviationBins:
    """Return predicted and observed errors in bins of the predicted deviation (Levi et al. 2022).

    Examples of equal deviation all count with their mean squared error, so the bins do not depend on the order of the
    examples.

    Args:
        error: [N] label minus prediction.
        deviation: [N] the predicted standard deviation of the label.
        num_bins: the number of bins; N if there are fewer examples.
    """
    error, deviation = vector_of("error", error), vector_of("deviation", deviation)
    require_same_length(error=error, deviation=deviation)
    if num_bins < 1:
        raise ValueError(f"num_bins must be at least 1, got {num_bins}")
    distinct, group, sizes = np.unique(deviation, return_inverse=True, return_counts=True)
    squares = (np.square(distinct), np.bincount(group, weights=np.square(error)) / sizes)  # one for each deviation
    parts = [np.array_split(np.repeat(values, sizes), min(num_bins, len(error))) for values in squares]
    count = np.array([len(part) for part in parts[0]], dtype=np.float64)
    return DeviationBins(count, *(np.sqrt([part.mean() for part in values]) for values in parts))


def expected_normalized_calibration_error(error: ArrayLike, deviation: ArrayLike, *, num_bins: int = NUM_BINS) -> float:
    """Return mean_b |predicted_b - observed_b| / predicted_b over the bins of ``deviation_bins`` (Levi et al. 2022).

    It is not 0 for a calibrated prediction: n errors in a bin have a root mean square that is off by 1 / sqrt(2 n).
    """
    bins = deviation_bins(error, deviation, num_bins=num_bins)
    if not (bins.predicted > 0).all():
        raise ValueError("deviation must be positive, got a bin where all predicted deviations are 0")
    return float((np.abs(bins.predicted - bins.observed) / bins.predicted).mean())
