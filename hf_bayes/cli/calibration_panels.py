"""Panels of the calibration on a test set: reliability of probabilities, coverage, and standard deviations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import SubFigure
from numpy.typing import NDArray

COLOURS = ("#4477AA", "#EE6677", "#228833", "#CCBB44", "#66CCEE", "#AA3377")  # Paul Tol's colour-blind safe palette

_WORDS = {
    "several_labels": ("share of labels present", "probability of a label", "test set, every label of every row, "),
}
"""The kind of the labels -> the words of the observed share, of the probability, and of the title."""


def draw_reliability(part: SubFigure, results: Mapping[str, Any]) -> None:
    """Draw the observed share over the probability, with Wilson's 68 % intervals, above the counts of the bins."""
    diagram, counts = part.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    observed, probability, title = _WORDS.get(results["kind"], ("accuracy", "confidence", "test set, "))
    bins = {name: np.array(values, dtype=np.float64) for name, values in results["reliability"].items()}
    count = bins["num_examples"]
    used = count > 0
    _with_intervals(diagram, bins["confidence"][used], bins["accuracy"][used], count[used])
    diagram.set(ylabel=observed, ylim=(-0.02, 1.02), title=f"{title}ECE {results['ece']:.4f}")
    edges = np.linspace(0, 1, len(count) + 1)
    counts.bar(edges[:-1], count, width=edges[1], align="edge", color=COLOURS[0], alpha=0.65, edgecolor="white")
    counts.set(xlabel=probability, ylabel="count", xlim=(0, 1), yscale="log", ylim=(0.5, 2 * count.max()))


def draw_coverage(part: SubFigure, results: Mapping[str, Any]) -> None:
    """Draw the share of labels within the central predictive intervals over the level of the intervals."""
    axis = part.subplots()
    level, covered = (np.array(results["coverage"][name]) for name in ("level", "covered"))
    _with_intervals(axis, level, covered, np.full(len(level), results["rows"]["test"]))
    axis.set(
        xlabel="level of the predictive interval",
        ylabel="share of labels within it",
        xlim=(0, 1),
        ylim=(-0.02, 1.02),
        title=f"test set, {100 * results['coverage_90']:.1f} % of labels in 90 % intervals",
    )


def draw_deviations(part: SubFigure, results: Mapping[str, Any]) -> None:
    """Draw the root mean squared error over the predicted deviation, in bins of equally many labels.

    With n errors in a bin the standard error of their root mean square r is about r / sqrt(2 n).
    """
    axis = part.subplots()
    bins = {name: np.array(values) for name, values in results["deviations"].items()}
    predicted, observed = bins["predicted"], bins["observed"]
    error = observed / np.sqrt(2 * bins["num_examples"])
    low, high = min(predicted.min(), (observed - error).min()), max(predicted.max(), (observed + error).max())
    axis.plot([low, high], [low, high], color="0.6", linewidth=1)
    axis.errorbar(predicted, observed, error, fmt="o", color=COLOURS[0], markersize=4, elinewidth=1)
    axis.set(
        xlabel="predictive standard deviation (units of the labels)",
        ylabel="RMSE (units of the labels)",
        title=f"test set, ENCE {results['ence']:.4f}",
    )


def _with_intervals(axis: Axes, expected: NDArray[Any], share: NDArray[Any], count: NDArray[Any]) -> None:
    """Draw observed shares over expected ones, with intervals, and the diagonal."""
    ends = [_interval(float(one), float(number)) for one, number in zip(share, count, strict=True)]
    axis.plot([0, 1], [0, 1], color="0.6", linewidth=1)
    error = np.abs(np.transpose(ends) - share)
    axis.errorbar(expected, share, error, fmt="o-", color=COLOURS[0], markersize=4, elinewidth=1)


def _interval(share: float, number: float) -> tuple[float, float]:
    """Return Wilson's 68 % interval of a probability from a share of so many rows. It is not 0 wide at 0 and 1."""
    from scipy.stats import binomtest

    found = binomtest(round(share * number), round(number)).proportion_ci(0.683, method="wilson")
    return float(found.low), float(found.high)
