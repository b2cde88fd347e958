"""The figure of an evaluation: uncertainties of all sets, a reliability diagram and risk-coverage curves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure

from hf_bayes.cli.evaluation_table import MEASURES
from hf_bayes.metrics.evaluation import Statistics, curves, uncertainties

COLOURS = ("#4477AA", "#EE6677", "#228833", "#CCBB44", "#66CCEE", "#AA3377")  # Paul Tol's colour-blind safe palette
LINES = ("-", "--", ":", "-.")
FILLED = 3  # more overlapping areas cannot be told apart
BINS = 30


def plot(found: Mapping[str, Statistics], results: Mapping[str, Any]) -> Figure:
    """Draw histograms of the uncertainties of each set, the reliability diagram, and the risk-coverage curves.

    Names are drawn unchanged: a dollar sign does not begin a formula.

    Args:
        found: the statistics of each set, "test" first.
        results: the dictionary of ``evaluation_results``.
    """
    with matplotlib.rc_context({"text.parse_math": False}):
        height = 7.2 + 0.2 * -(-len(found) // 2)  # room for the legends, which would hide bars inside
        figure = Figure(figsize=(11, height), layout="constrained")
        parts = figure.subfigures(2, 2, squeeze=False, height_ratios=(height - 3.6, 3.6))
        left, right, lower_left, lower_right = parts.flatten()
        _histograms(left.subplots(), found, results, "total")
        _histograms(right.subplots(), found, results, "epistemic")
        _reliability(lower_left, results)
        _risk_coverage(lower_right.subplots(), found["test"], results)
    return figure


def _look(number: int) -> dict[str, Any]:
    """Return the style of the histogram of a set: areas for the first sets, outlines for all further ones."""
    turn, place = divmod(number, len(COLOURS))
    if number < FILLED:
        return {"color": COLOURS[place], "alpha": 0.65}
    return {"color": COLOURS[place], "histtype": "step", "linestyle": LINES[turn % len(LINES)], "linewidth": 1.5}


def _histograms(axis: Axes, found: Mapping[str, Statistics], results: Mapping[str, Any], measure: str) -> None:
    """Draw the share of the rows of each set in bins of an uncertainty."""
    every = {name: uncertainties(values) for name, values in found.items()}
    scores = {name: measures[measure].mean(1) for name, measures in every.items() if measure in measures}
    if not scores:
        axis.set_axis_off()
        return
    edges = np.histogram_bin_edges(np.concatenate(list(scores.values())), BINS)
    for number, (name, values) in enumerate(scores.items()):
        area = results["auroc"].get(name, {}).get(measure)
        label = name if area is None else f"{name} (AUROC {area:.3f})"
        axis.hist(values, edges.tolist(), weights=np.full(len(values), 1 / len(values)), label=label, **_look(number))
    mean = ", mean of a row" if found["test"][measure].shape[1] > 1 else ""
    axis.set(xlabel=f"{measure} uncertainty (nats{mean})", ylabel="share of rows")
    axis.ticklabel_format(axis="x", scilimits=(-2, 3))
    axis.legend(frameon=False, fontsize=8, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.17))


def _reliability(part: SubFigure, results: Mapping[str, Any]) -> None:
    """Draw accuracy over confidence, with Wilson's 68 % intervals, above the counts of the bins."""
    diagram, counts = part.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    values = {name: np.array(values, dtype=np.float64) for name, values in results["reliability"].items()}
    count = values["num_examples"]
    used = count > 0
    confidence, accuracy = values["confidence"][used], values["accuracy"][used]
    ends = [_interval(share, number) for share, number in zip(accuracy, count[used], strict=True)]
    error = np.abs(np.transpose(ends) - accuracy)
    diagram.plot([0, 1], [0, 1], color="0.6", linewidth=1)
    diagram.errorbar(confidence, accuracy, error, fmt="o-", color=COLOURS[0], markersize=4, elinewidth=1)
    diagram.set(ylabel="accuracy", ylim=(-0.02, 1.02), title=f"test set, ECE {results['ece']:.4f}")
    edges = np.linspace(0, 1, len(count) + 1)
    counts.bar(edges[:-1], count, width=edges[1], align="edge", color=COLOURS[0], alpha=0.65, edgecolor="white")
    counts.set(xlabel="confidence", ylabel="count", xlim=(0, 1), yscale="log", ylim=(0.5, 2 * count.max()))


def _interval(share: float, number: float) -> tuple[float, float]:
    """Return Wilson's 68 % interval of a probability from a share of so many rows. It is not 0 wide at 0 and 1."""
    from scipy.stats import binomtest

    found = binomtest(round(share * number), round(number)).proportion_ci(0.683, method="wilson")
    return float(found.low), float(found.high)


def _risk_coverage(axis: Axes, test: Statistics, results: Mapping[str, Any]) -> None:
    """Draw the error rate of the answered part of the test set, by each measure and by the best order."""
    for number, (name, curve) in enumerate(curves(test).items()):
        label = f"{MEASURES.get(name, 'best order')} (AURC {results['aurc'][name]:.4f})"
        style: dict[str, Any] = {"color": "0.6", "linestyle": "--"} if name == "best" else {"color": COLOURS[number]}
        axis.plot(curve.coverage, curve.risk, label=label, linewidth=1.3, **style)
    axis.set(
        xlabel="coverage: share answered, the least uncertain first",
        ylabel="risk: error rate of these",
        xlim=(0, 1),
        title=f"test set, accuracy {results['accuracy']:.4f}",
    )
    axis.set_ylim(bottom=0)
    axis.legend(frameon=False, fontsize=8, loc="best")  # the free corner depends on the accuracy
