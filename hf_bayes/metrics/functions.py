"""Scores of predictions and of uncertainties, computed from one number per example. Lower is better, except AUROC."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]


class RiskCoverageCurve(NamedTuple):
    """The mean loss if only the least uncertain examples are answered (Geifman and El-Yaniv 2017).

    Attributes:
        coverage: [N] the fraction of answered examples, 1/N, 2/N, ..., 1.
        risk: [N] the mean loss of the answered examples.
        aurc: the mean of ``risk``, which is the area under the curve.
    """

    coverage: Array
    risk: Array
    aurc: float


class ReliabilityBins(NamedTuple):
    """Accuracy and confidence in bins of equal width on (0, 1], closed above (Guo et al. 2017).

    Attributes:
        num_examples: [B] the number of examples in each bin.
        confidence: [B] their mean confidence; NaN in empty bins.
        accuracy: [B] the share of them whose predicted class was the label; NaN in empty bins.
    """

    num_examples: Array
    confidence: Array
    accuracy: Array


def negative_log_likelihood(nll: ArrayLike) -> float:
    """Return the mean of -log p(label), in nats per label.

    Args:
        nll: [N], as ``per_row_statistics`` returns it; +inf where a label had probability 0.
    """
    return mean_of("nll", nll)


def perplexity(nll: float) -> float:
    """Return exp(nll), the perplexity of a language model; infinity if it overflows.

    Args:
        nll: the mean NLL of next tokens, in nats per token.
    """
    return math.exp(nll) if nll < 700 else math.inf


def brier(terms: ArrayLike) -> float:
    """Return the mean of sum_c (p_c - [c is the label])^2, between 0 and 2.

    Args:
        terms: [N] the sums, as ``per_row_statistics`` returns them.
    """
    return mean_of("brier", terms)


def average_coverage_error(covered: ArrayLike, *, coverage: float = 0.682) -> float:
    """Return |coverage - mean of covered| (penalty_bnn eq. 20): the error of intervals that should contain 68.2 %.

    Args:
        covered: [N] 1 if a label was within its interval, else 0; or the covered share of a row's labels.
        coverage: the nominal coverage; 0.682 for one-sigma intervals.
    """
    return abs(coverage - mean_of("covered", covered))


def mean_of(name: str, values: ArrayLike) -> float:
    """Return the mean of [N] numbers. Infinity is accepted; NaN raises an error with the name of the numbers."""
    return float(vector_of(name, values, infinite=True).mean())


def reliability(confidence: ArrayLike, correct: ArrayLike, *, num_bins: int = 15) -> ReliabilityBins:
    """Return the counts, mean confidences and accuracies of a reliability diagram.

    Args:
        confidence: [N] probability of the predicted class.
        correct: [N] 1 if the predicted class was the label, else 0.
        num_bins: the number of bins.
    Raises:
        ValueError: for confidences outside [0, 1] (beyond rounding) or ``correct`` other than 0 and 1.
    """
    confidence, correct = vector_of("confidence", confidence), vector_of("correct", correct)
    require_same_length(confidence=confidence, correct=correct)
    if confidence.min() < 0 or confidence.max() > 1 + 1e-4:
        raise ValueError(
            f"confidence must be probabilities in [0, 1], got values in [{confidence.min():g}, {confidence.max():g}]"
        )
    if not np.isin(correct, (0, 1)).all():
        raise ValueError("correct must hold 0 and 1 only: whether the predicted class was the label")
    if num_bins < 1:
        raise ValueError(f"num_bins must be at least 1, got {num_bins}")
    bins = np.clip(np.ceil(confidence * num_bins).astype(int) - 1, 0, num_bins - 1)
    count = np.bincount(bins, minlength=num_bins).astype(np.float64)
    sums = (np.bincount(bins, weights=values, minlength=num_bins) for values in (confidence, correct))
    with np.errstate(invalid="ignore"):
        return ReliabilityBins(count, *(total / count for total in sums))


def expected_calibration_error(confidence: ArrayLike, correct: ArrayLike, *, num_bins: int = 15) -> float:
    """Return the mean over examples of |accuracy - mean confidence| of their bin (Guo et al. 2017, eq. 3).

    The arguments and errors are those of ``reliability``.
    """
    bins = reliability(confidence, correct, num_bins=num_bins)
    used = bins.num_examples > 0
    gaps = np.abs(bins.accuracy[used] - bins.confidence[used])
    return float(np.average(gaps, weights=bins.num_examples[used]))


def ood_auroc(uncertainty: ArrayLike, is_ood: ArrayLike) -> float:
    """Return the probability that an out-of-distribution example is more uncertain than an in-distribution example.

    Ties count one half.

    Args:
        uncertainty: [N] a score that should be higher out of distribution (epistemic, total, nll, ...).
        is_ood: [N] 1 for out-of-distribution examples, 0 for in-distribution examples; both must occur.
    """
    from sklearn.metrics import roc_auc_score

    uncertainty, is_ood = vector_of("uncertainty", uncertainty), vector_of("is_ood", is_ood)
    require_same_length(uncertainty=uncertainty, is_ood=is_ood)
    if set(np.unique(is_ood)) != {0.0, 1.0}:
        raise ValueError(
            f"is_ood must hold both 0 (in distribution) and 1 (out of it), got {np.unique(is_ood)[:5].tolist()}"
        )
    return float(roc_auc_score(is_ood, uncertainty))


def risk_coverage(uncertainty: ArrayLike, loss: ArrayLike) -> RiskCoverageCurve:
    """Return the mean loss of the k least uncertain examples, for every k.

    Examples of equal uncertainty all count with their mean loss, so the curve does not depend on the order of the
    examples.

    Args:
        uncertainty: [N]; higher means less sure.
        loss: [N] 0/1 errors, or any loss.
    """
    uncertainty, loss = vector_of("uncertainty", uncertainty), vector_of("loss", loss)
    require_same_length(uncertainty=uncertainty, loss=loss)
    _, group, sizes = np.unique(uncertainty, return_inverse=True, return_counts=True)
    mean_loss = np.bincount(group, weights=loss) / sizes
    count = np.arange(1, len(loss) + 1)
    risk = np.cumsum(np.repeat(mean_loss, sizes)) / count
    return RiskCoverageCurve(count / len(loss), risk, float(risk.mean()))


def vector_of(name: str, values: ArrayLike, *, infinite: bool = False) -> Array:
    """Return the values as a float64 vector [N >= 1]; NaN, and infinity unless allowed, raise an error."""
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or array.size == 0:
        raise ValueError(f"{name} must be a non-empty vector, one number per example; got shape {list(array.shape)}")
    bad = np.isnan(array) if infinite else ~np.isfinite(array)
    if bad.any():
        raise ValueError(
            f"{int(bad.sum())} of {len(array)} values of {name} are not finite, the first at {int(bad.argmax())}: "
            "remove padding first"
        )
    return array


def require_same_length(**arrays: Array) -> None:
    """Raise a ValueError if the vectors differ in length."""
    if len({len(array) for array in arrays.values()}) > 1:
        found = ", ".join(f"{name} {len(array)}" for name, array in arrays.items())
        raise ValueError(f"one number per example is needed in each, got lengths {found}")
