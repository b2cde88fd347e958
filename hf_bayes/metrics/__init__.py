"""How good predictions and their uncertainties are: plain functions, and the same as ``evaluate`` metrics.

The functions are the core and need numpy only (``ood_auroc`` scikit-learn). The classes ``NLL``, ``ECE``, ``Brier``,
``OODAUROC`` and ``RiskCoverage`` wrap them as ``evaluate.Metric``; ``load(name)`` gives one without hub or network.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hf_bayes.metrics.functions import (
    RiskCoverageCurve,
    average_coverage_error,
    brier,
    expected_calibration_error,
    negative_log_likelihood,
    ood_auroc,
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
    "RiskCoverage",
    "RiskCoverageCurve",
    "average_coverage_error",
    "brier",
    "classification_statistics",
    "expected_calibration_error",
    "load",
    "negative_log_likelihood",
    "ood_auroc",
    "per_row_statistics",
    "risk_coverage",
    "summarise",
]

_CLASSES = {"nll": "NLL", "ece": "ECE", "brier": "Brier", "ood_auroc": "OODAUROC", "risk_coverage": "RiskCoverage"}


def load(name: str, config_name: str | None = None, **kwargs: Any) -> Metric:
    """An ``evaluate.Metric`` by name, from this package: nll, ece, brier, ood_auroc or risk_coverage.

    Args:
        name: as above.
        config_name: which inputs it takes, "classification", "tokens" or "scores" (see ``evaluate_metrics``).
        **kwargs: what ``evaluate.Metric`` takes (``keep_in_memory``, ``experiment_id``, ...).
    Raises:
        ValueError: for another name.
    """
    if name not in _CLASSES:
        raise ValueError(f"unknown metric {name!r}: hf_bayes.metrics has {', '.join(_CLASSES)}")
    return __getattr__(_CLASSES[name])(config_name, **kwargs)


def __getattr__(name: str) -> Any:
    # evaluate brings datasets, pandas and pyarrow: only those who want a Metric wait for them.
    if name not in _CLASSES.values():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from hf_bayes.metrics import evaluate_metrics

    return getattr(evaluate_metrics, name)
