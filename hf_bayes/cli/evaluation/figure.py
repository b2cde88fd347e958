"""The figure of an evaluation: uncertainties of all sets, calibration, and risk-coverage curves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure

from hf_bayes.cli.calibration_panels import COLOURS, draw_coverage, draw_deviations, draw_reliability
from hf_bayes.cli.evaluation.table import MEASURES
from hf_bayes.metrics.evaluation import curves, row_means, uncertainties
from hf_bayes.metrics.figures import Figures, Statistics

LINES = ("-", "--", ":", "-.")
BINS = 30
SMALLEST_COVERAGE = 0.05

Panel = Callable[[SubFigure, Mapping[str, Any]], None]


class Drawing(NamedTuple):
    """The panels of a kind of labels, and their words.

    Attributes:
        measures: the uncertainties with a histogram of all sets; the name -> the unit.
        calibration: the functions that draw the calibration on the test set. There are four panels with the
            histograms and the risk-coverage curves.
        risk: the risk of the answered part of the test set.
        quality: the figure in the title of the risk-coverage curves, and its words.
    """

    measures: Mapping[str, str]
    calibration: tuple[Panel, ...]
    risk: str
    quality: tuple[str, str]


_NATS = {"total": "nats", "epistemic": "nats"}
_CLASSES = Drawing(_NATS, (draw_reliability,), "error rate of these", ("accuracy", "accuracy"))
_LABELS = Drawing(
    {name: "nats, sum over the labels" for name in _NATS},
    (draw_reliability,),
    "share with a wrong label",
    ("exact_match", "all labels right"),
)
_NUMBERS = Drawing(
    {"epistemic_std": "units of the labels"},
    (draw_coverage, draw_deviations),
    "mean squared error of these",
    ("rmse", "RMSE"),
)
_OWN_NUMBERS = _NUMBERS._replace(
    measures={name: "units of the labels" for name in ("predictive_std", "epistemic_std")},
    calibration=(draw_deviations,),
)
DRAWINGS = {
    "classes": _CLASSES,
    "next_tokens": _CLASSES,
    "tags": _CLASSES,
    "several_labels": _LABELS,
    "numbers": _NUMBERS,
    "own_numbers": _OWN_NUMBERS,
}
"""The kind of the labels -> the panels of the figure."""


def plot(found: Mapping[str, Statistics], results: Mapping[str, Any], figures: Figures) -> Figure:
    """Draw histograms of the uncertainties of each set, the calibration, and the risk-coverage curves.

    Names are drawn unchanged: a dollar sign does not begin a formula.

    Args:
        found: the statistics of each set, "test" first.
        results: the dictionary of ``evaluation_results``.
        figures: the figures of the labels.
    """
    drawing = DRAWINGS[figures.kind]
    with matplotlib.rc_context({"text.parse_math": False}):
        height = 7.2 + 0.2 * -(-len(found) // 2)  # room for the legends, which would hide bars inside
        figure = Figure(figsize=(11, height), layout="constrained")
        parts = figure.subfigures(2, 2, squeeze=False, height_ratios=(height - 3.6, 3.6)).flatten().tolist()
        every = {name: uncertainties(statistics, figures) for name, statistics in found.items()}
        for measure, unit in drawing.measures.items():
            scores = {name: row_means(own[measure]) for name, own in every.items() if measure in own}
            long = any(measure in own and own[measure].shape[1] > 1 for own in every.values())
            label = f"{MEASURES[measure]} ({unit}{', mean of a row' if long else ''})"
            _histograms(parts.pop(0).subplots(), scores, label, results, measure)
        for draw in drawing.calibration:
            draw(parts.pop(0), results)
        _risk_coverage(parts.pop(0).subplots(), found["test"], results, figures)
    return figure


def _look(number: int) -> dict[str, Any]:
    """Return the style of the histogram of a set: an area for the test set, and outlines for all others.

    Overlapping areas would mix their colours, which some eyes cannot tell apart; lines differ in their dashes, too.
    """
    colour = COLOURS[number % len(COLOURS)]
    if number == 0:
        return {"color": colour, "alpha": 0.65}
    return {"color": colour, "histtype": "step", "linestyle": LINES[(number - 1) % len(LINES)], "linewidth": 1.7}


def _histograms(
    axis: Axes, scores: Mapping[str, np.ndarray], label: str, results: Mapping[str, Any], measure: str
) -> None:
    """Draw the share of the rows of each set in bins of an uncertainty."""
    if not scores:
        axis.set_axis_off()
        return
    edges = np.histogram_bin_edges(np.concatenate(list(scores.values())), BINS)
    for number, (name, values) in enumerate(scores.items()):
        area = results["auroc"].get(name, {}).get(measure)
        words = name if area is None else f"{name} (AUROC {area:.3f})"
        axis.hist(values, edges.tolist(), weights=np.full(len(values), 1 / len(values)), label=words, **_look(number))
    axis.set(xlabel=label, ylabel="share of rows")
    axis.ticklabel_format(axis="x", scilimits=(-2, 3))
    axis.legend(frameon=False, fontsize=8, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.17))


def _risk_coverage(axis: Axes, test: Statistics, results: Mapping[str, Any], figures: Figures) -> None:
    """Draw the risk of the answered part of the test set, by each measure and by the best order."""
    drawing, found = DRAWINGS[figures.kind], curves(test, figures)
    for number, (name, curve) in enumerate(found.items()):
        label = f"{MEASURES.get(name, 'best order')} (AURC {results['aurc'][name]:.4f})"
        style: dict[str, Any] = {"color": "0.6", "linestyle": "--"} if name == "best" else {"color": COLOURS[number]}
        axis.plot(curve.coverage, curve.risk, label=label, linewidth=1.3, **style)
    quality, words = drawing.quality
    axis.set(
        xlabel="coverage: share answered, the least uncertain first",
        ylabel=f"risk: {drawing.risk}",
        xlim=(0, 1),
        title=f"test set, {words} {results[quality]:.4f}",
    )
    # the means of a few rows vary too much to set the scale
    highest = max(curve.risk[curve.coverage >= SMALLEST_COVERAGE].max() for curve in found.values())
    axis.set_ylim(0, 1.1 * highest or None)
    axis.legend(frameon=False, fontsize=8, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.2))
