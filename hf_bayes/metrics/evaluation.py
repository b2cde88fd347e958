"""The results of an evaluation: scores of the test set, risk-coverage, and detection of other inputs, with errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from hf_bayes.metrics.figures import CLASSES, Array, Figures, Statistics, terms
from hf_bayes.metrics.functions import RiskCoverageCurve, mean_of, ood_auroc, risk_coverage
from hf_bayes.metrics.standard_errors import auroc_std_error, bootstrap_std_error, mean_std_error


def evaluation_results(
    test: Statistics, others: Mapping[str, Statistics], figures: Figures = CLASSES
) -> dict[str, Any]:
    """Return the figures of a test set, and the AUROC with which each other set is told from it.

    Args:
        test: the statistics that ``figures`` reads.
        others: name of another set -> its ``measures`` of uncertainty.
        figures: the figures of the kind of labels.
    Returns:
        ``kind``; the figures; ``aurc`` by each measure of ``uncertainties`` and by the ``best`` possible order;
        ``auroc`` of each other set by each measure, of the mean over the terms of a row; the diagrams; ``rows`` of each
        set; and ``std_error``, with the names of the figures that have one. A standard error that cannot be estimated
        is None.
    """
    means = {name: source for name, source in figures.means.items() if source in test}
    areas, errors = _auroc(test, others, figures)
    return {
        "kind": figures.kind,
        "rows": {"test": num_rows(test)} | {name: num_rows(other) for name, other in others.items()},
        **{name: mean_of(source, terms(test[source])) for name, source in means.items()},
        **{name: function(test) for name, function in figures.functions.items()},
        "aurc": {name: curve.aurc for name, curve in curves(test, figures).items()},
        "auroc": areas,
        **{name: diagram(test) for name, diagram in figures.diagrams.items()},
        "std_error": {
            **{name: mean_std_error(test[source]) for name, source in means.items()},
            **{
                name: bootstrap_std_error(partial(_of_rows, function, test), num_rows(test))
                for name, function in figures.functions.items()
            },
            "aurc": {
                name: _aurc_std_error(scores, figures.loss(test))
                for name, scores in uncertainties(test, figures).items()
            },
            "auroc": errors,
        },
    }


def num_rows(statistics: Statistics) -> int:
    """Return R."""
    return len(next(iter(statistics.values())))


def uncertainties(statistics: Statistics, figures: Figures = CLASSES) -> dict[str, Array]:
    """Return the measures by which rows can be ordered, each [R, T].

    They are the ``measures`` of the figures, and ``confidence``, which is 1 - the largest probability. A measure that
    is not defined, or is 0 everywhere, as the epistemic uncertainty of one member, is left out.
    """
    measured = {name: statistics[name] for name in figures.measures if name in statistics}
    found = {name: values for name, values in measured.items() if np.any(terms(values))}
    return {**found, "confidence": 1 - statistics["confidence"]} if figures.confidence else found


def curves(test: Statistics, figures: Figures = CLASSES) -> dict[str, RiskCoverageCurve]:
    """Return the risk-coverage curve by each measure, and by the ``best`` order, which has the largest losses last."""
    losses = figures.loss(test)
    found = {name: _curve(scores, losses) for name, scores in uncertainties(test, figures).items()}
    return {**found, "best": _curve(losses, losses)}


def row_means(values: Array) -> Array:
    """Return the means [R] over the terms of each row."""
    means: Array = np.nanmean(values, 1)
    return means


def _curve(scores: Array, losses: Array) -> RiskCoverageCurve:
    return risk_coverage(terms(scores), terms(losses))


def _of_rows(function: Callable[[Statistics], float], statistics: Statistics, rows: Any) -> float:
    """Return the figure of some of the rows."""
    return function({name: values[rows] for name, values in statistics.items()})


def _auroc(
    test: Statistics, others: Mapping[str, Statistics], figures: Figures
) -> tuple[dict[str, dict[str, float]], dict[str, dict[str, float | None]]]:
    inside = {name: row_means(scores) for name, scores in uncertainties(test, figures).items()}
    areas: dict[str, dict[str, float]] = {}
    errors: dict[str, dict[str, float | None]] = {}
    for other, statistics in others.items():
        outside = {name: row_means(scores) for name, scores in uncertainties(statistics, figures).items()}
        pairs = {name: (inside[name], outside[name]) for name in inside if name in outside}
        is_other = np.repeat([0, 1], [num_rows(test), num_rows(statistics)])
        areas[other] = {name: ood_auroc(np.concatenate(pair), is_other) for name, pair in pairs.items()}
        errors[other] = {name: auroc_std_error(*pair) for name, pair in pairs.items()}
    return areas, errors


def _aurc_std_error(scores: Array, losses: Array) -> float | None:
    return bootstrap_std_error(lambda rows: _curve(scores[rows], losses[rows]).aurc, len(losses))
