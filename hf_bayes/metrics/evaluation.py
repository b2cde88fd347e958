"""The figures of an evaluation: scores of the test set, risk-coverage, and detection of other inputs, with errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hf_bayes.metrics.functions import (
    RiskCoverageCurve,
    expected_calibration_error,
    ood_auroc,
    perplexity,
    reliability,
    risk_coverage,
)
from hf_bayes.metrics.standard_errors import auroc_std_error, bootstrap_std_error, mean_std_error
from hf_bayes.metrics.statistics import summarise

Statistics = Mapping[str, NDArray[np.float64]]
"""Statistics by name, each [R, T]: R rows (texts, or windows of a text) of T terms (one class, or T tokens)."""

_MEANS = {"nll": "nll", "member_nll": "member_nll", "brier": "brier", "accuracy": "correct"}
"""The figures that are means of a statistic."""


def evaluation_results(test: Statistics, others: Mapping[str, Statistics], *, next_tokens: bool) -> dict[str, Any]:
    """Return the figures of a test set, and the AUROC with which each other set is told from it.

    Args:
        test: ``nll``, ``confidence``, ``correct``, ``brier``, ``total`` and, if the model defines them, ``aleatoric``,
            ``epistemic`` and ``member_nll``.
        others: name of another set -> its ``confidence``, ``total`` and ``epistemic``.
        next_tokens: True for a language model, which also has a perplexity.
    Returns:
        The numbers of ``summarise``; ``aurc`` by each measure of ``uncertainties`` and by the ``best`` possible order;
        ``auroc`` of each other set by each measure, of the mean over the terms of a row; ``reliability`` with the
        lists of ``ReliabilityBins``; ``rows`` of each set; and ``std_error``, with the names of the figures that have
        one. A standard error that cannot be estimated is None.
    """
    found: dict[str, Any] = dict(summarise({name: values.ravel() for name, values in test.items()}))
    if next_tokens:
        found["perplexity"] = perplexity(found["nll"])
    bins = reliability(test["confidence"].ravel(), test["correct"].ravel())
    areas, errors = _auroc(test, others)
    return {
        "rows": {"test": len(test["nll"])} | {name: len(other["total"]) for name, other in others.items()},
        **found,
        "aurc": {name: curve.aurc for name, curve in curves(test).items()},
        "auroc": areas,
        "reliability": {
            name: [None if np.isnan(value) else float(value) for value in values]
            for name, values in bins._asdict().items()
        },
        "std_error": {
            **{name: mean_std_error(test[source]) for name, source in _MEANS.items() if source in test},
            "ece": _ece_std_error(test),
            "aurc": {name: _aurc_std_error(test, scores) for name, scores in uncertainties(test).items()},
            "auroc": errors,
        },
    }


def uncertainties(statistics: Statistics) -> dict[str, NDArray[np.float64]]:
    """Return the measures by which rows can be ordered, each [R, T].

    They are ``total``, ``epistemic``, and ``confidence``, which is 1 - the largest probability. Epistemic uncertainty
    that is 0 everywhere, as for one member, is left out.
    """
    found = {"total": statistics["total"]}
    if "epistemic" in statistics and np.any(statistics["epistemic"]):
        found["epistemic"] = statistics["epistemic"]
    return {**found, "confidence": 1 - statistics["confidence"]}


def curves(test: Statistics) -> dict[str, RiskCoverageCurve]:
    """Return the risk-coverage curve by each measure, and by the ``best`` order, which has the errors last."""
    errors = 1 - test["correct"].ravel()
    found = {name: risk_coverage(scores.ravel(), errors) for name, scores in uncertainties(test).items()}
    return {**found, "best": risk_coverage(errors, errors)}


def _auroc(
    test: Statistics, others: Mapping[str, Statistics]
) -> tuple[dict[str, dict[str, float]], dict[str, dict[str, float | None]]]:
    inside = {name: scores.mean(1) for name, scores in uncertainties(test).items()}
    areas: dict[str, dict[str, float]] = {}
    errors: dict[str, dict[str, float | None]] = {}
    for other, statistics in others.items():
        outside = {name: scores.mean(1) for name, scores in uncertainties(statistics).items() if name in inside}
        is_other = np.repeat([0, 1], [len(test["nll"]), len(statistics["total"])])
        pairs = {name: (inside[name], outside[name]) for name in outside}
        areas[other] = {name: ood_auroc(np.concatenate(pair), is_other) for name, pair in pairs.items()}
        errors[other] = {name: auroc_std_error(*pair) for name, pair in pairs.items()}
    return areas, errors


def _ece_std_error(test: Statistics) -> float | None:
    confidence, correct = test["confidence"], test["correct"]
    return bootstrap_std_error(
        lambda rows: expected_calibration_error(confidence[rows].ravel(), correct[rows].ravel()), len(correct)
    )


def _aurc_std_error(test: Statistics, scores: NDArray[np.float64]) -> float | None:
    errors = 1 - test["correct"]
    return bootstrap_std_error(lambda rows: risk_coverage(scores[rows].ravel(), errors[rows].ravel()).aurc, len(errors))
