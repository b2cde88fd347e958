"""Per-row statistics, from which every metric is computed.

A row is an example or a token. Each statistic is one number per row, so no [N, vocabulary] tensor needs to be kept.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from hf_bayes.metrics.functions import (
    average_coverage_error,
    brier,
    expected_calibration_error,
    mean_of,
    negative_log_likelihood,
)
from hf_bayes.uncertainty.likelihoods import widened

# The rounding error of bfloat16 between 8 and 16 is up to 0.03. It is a relative error of 0.03 in the probabilities of
# 3000 to 9 million equal classes.
_MASS_TOLERANCE = 0.05


def per_row_statistics(log_probs: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Return the statistics that ``summarise`` and the metrics need, from normalised predictions.

    Args:
        log_probs: [N, C] log-probabilities, such as the log of a mixture; -inf is probability 0.
        labels: [N] integers in [0, C). Remove rows with ignored labels (-100) first.
    Returns:
        A dict of float32 vectors [N]: ``nll`` is -log p(label), ``confidence`` the probability of the predicted class,
        ``correct`` 0 or 1, and ``brier`` sum_c (p_c - [c is the label])^2.
    Raises:
        ValueError: if the shapes do not match, a label is outside [0, C), or ``log_probs`` are not normalised.
    """
    if log_probs.ndim != 2 or labels.shape != log_probs.shape[:1]:
        raise ValueError(
            f"statistics need log_probs [N, C] and labels [N], got {list(log_probs.shape)} and {list(labels.shape)}"
        )
    num_classes = log_probs.shape[1]
    if bool(((labels < 0) | (labels >= num_classes)).any()):
        raise ValueError(
            f"labels must lie in [0, {num_classes}), got {int(labels.min())} to {int(labels.max())}: "
            "remove rows with ignored labels (-100) first"
        )
    # exp2 is several times as fast as exp on CPU. Widen first: in low precision the product would be rounded.
    probs = (widened(log_probs) * math.log2(math.e)).exp2_()
    mass = probs.sum(1)
    if not bool(((mass - 1).abs() <= _MASS_TOLERANCE).all()):
        raise ValueError(
            "statistics need log-probabilities, whose exponentials sum to 1, got rows that sum to "
            f"{float(mass.min()):.3g} to {float(mass.max()):.3g}: apply log_softmax to logits, mixture to members"
        )
    chosen = log_probs.gather(1, labels[:, None].long())[:, 0]
    best, predicted = log_probs.max(1)
    squares = probs.square_().sum(1)
    return {
        "nll": -chosen.float(),
        "confidence": best.exp().float(),
        "correct": (predicted == labels).float(),
        "brier": (squares - 2 * chosen.exp() + 1).float(),
    }


def classification_statistics(probabilities: ArrayLike, labels: ArrayLike) -> dict[str, NDArray[np.float64]]:
    """Return the statistics of ``per_row_statistics`` in numpy float64, from class probabilities.

    Args:
        probabilities: [N, C]; each row sums to 1 within 1e-3.
        labels: [N] integers in [0, C).
    """
    probabilities, labels = np.asarray(probabilities, dtype=np.float64), np.asarray(labels)
    if probabilities.ndim != 2 or labels.shape != probabilities.shape[:1] or probabilities.size == 0:
        raise ValueError(
            f"need probabilities [N >= 1, C] and labels [N], got {list(probabilities.shape)} and {list(labels.shape)}"
        )
    if not (probabilities >= 0).all() or not np.allclose(probabilities.sum(1), 1, rtol=0, atol=1e-3):
        raise ValueError(
            "predictions must be class probabilities: not negative, each row summing to 1. "
            "Apply softmax to logits, and exp to log-probabilities"
        )
    num_classes = probabilities.shape[1]
    if labels.min() < 0 or labels.max() >= num_classes:
        raise ValueError(f"labels must lie in [0, {num_classes}), got {labels.min()} to {labels.max()}")
    chosen = np.take_along_axis(probabilities, labels[:, None].astype(int), axis=1)[:, 0]
    with np.errstate(divide="ignore"):
        nll = -np.log(chosen)
    return {
        "nll": nll,
        "confidence": probabilities.max(1),
        "correct": (probabilities.argmax(1) == labels).astype(np.float64),
        "brier": np.square(probabilities).sum(1) - 2 * chosen + 1,
    }


def summarise(statistics: Mapping[str, ArrayLike]) -> dict[str, float]:
    """Compute the metrics over all rows together. Every row (token or example) has the same weight.

    Args:
        statistics: [N] arrays by name. ``nll`` gives nll, ``confidence`` and ``correct`` give accuracy and ece,
            ``brier`` gives brier, and ``covered`` gives ace. Any other array (``total``, ``aleatoric``,
            ``epistemic``, ...) gives its mean under its own name.
    Returns:
        The value of each metric, by name.
    Raises:
        ValueError: if there are no rows, arrays differ in length, a value is NaN, or there is ``confidence`` without
            ``correct``. Remove padding first.
    """
    arrays = {name: np.asarray(values, dtype=np.float64) for name, values in statistics.items()}
    shapes = {array.shape for array in arrays.values()}
    if len(shapes) != 1 or len(shape := shapes.pop()) != 1 or shape[0] == 0:
        found = ", ".join(f"{name} {list(array.shape)}" for name, array in arrays.items())
        raise ValueError(f"statistics must be non-empty vectors of one length, got {found or 'none'}")
    if "confidence" in arrays and "correct" not in arrays:
        raise ValueError(f"confidence needs correct beside it, for the ece; got {', '.join(arrays)}")
    summary: dict[str, float] = {}
    for name, array in arrays.items():
        if name == "nll":
            summary["nll"] = negative_log_likelihood(array)
        elif name == "correct":
            summary["accuracy"] = mean_of("correct", array)
        elif name == "confidence":
            summary["ece"] = expected_calibration_error(array, arrays["correct"])
        elif name == "covered":
            summary["ace"] = average_coverage_error(array)
        elif name == "brier":
            summary["brier"] = brier(array)
        else:
            summary[name] = mean_of(name, array)
    return summary
