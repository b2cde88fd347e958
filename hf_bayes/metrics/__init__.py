"""Metrics of predictions and of their uncertainties, as functions and as ``evaluate`` metrics.

The functions need numpy only; ``ood_auroc`` also needs scikit-learn, and standard errors need scipy. The classes
``NLL``, ``ECE``, ``Brier``, ``OODAUROC`` and ``RiskCoverage`` wrap them as ``evaluate.Metric``. ``load(name)`` creates
one of these without using the hub or the network.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hf_bayes.metrics.evaluation import evaluation_results
from hf_bayes.metrics.functions import (
    ReliabilityBins,
    RiskCoverageCurve,
    average_coverage_error,
    brier,
    expected_calibration_error,
    negative_log_likelihood,
    ood_auroc,
    perplexity,
    reliability,
    risk_coverage,
)
from hf_bayes.metrics.statistics import classification_statistics, per_row_statistics, summarise

if TYPE_CHECKING:
    from evaluate import Metric

    from hf_bayes.metrics.evaluate_metrics import ECE, NLL, OODAUROC, Brier, RiskCoverage

__all__ = [
    "ECE",
    "NLL",
    "OODAUROC",
    "Brier",
    "ReliabilityBins",
    "RiskCoverage",
    "RiskCoverageCurve",
    "average_coverage_error",
    "brier",
    "classification_statistics",
    "evaluation_results",
    "expected_calibration_error",
    "load",
    "negative_log_likelihood",
    "ood_auroc",
    "per_row_statistics",
    "perplexity",
    "reliability",
    "risk_coverage",
    "summarise",
]

_CLASSES = {"nll": "NLL", "ece": "ECE", "brier": "Brier", "ood_auroc": "OODAUROC", "risk_coverage": "RiskCoverage"}


def load(name: str, config_name: str | None = None, **kwargs: Any) -> Metric:
    """Create an ``evaluate.Metric`` of this package by its name: nll, ece, brier, ood_auroc or risk_coverage.

    Args:
        name: one of the names above.
        config_name: the kind of inputs, "classification", "tokens" or "scores" (see ``evaluate_metrics``).
        **kwargs: arguments of ``evaluate.Metric`` (``keep_in_memory``, ``experiment_id``, ...).
    Raises:
        ValueError: if the name is unknown.
    """
    if name not in _CLASSES:
        raise ValueError(f"unknown metric {name!r}: hf_bayes.metrics has {', '.join(_CLASSES)}")
    metric: Metric = __getattr__(_CLASSES[name])(config_name, **kwargs)
    return metric


def __getattr__(name: str) -> Any:
    # evaluate imports datasets, pandas and pyarrow, which is slow: import it only when a Metric is needed.
    if name not in _CLASSES.values():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from hf_bayes.metrics import evaluate_metrics

    return getattr(evaluate_metrics, name)
