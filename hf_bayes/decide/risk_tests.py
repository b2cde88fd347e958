"""P-values for the hypothesis that a risk exceeds its limit, from the losses of independent rows.

``binomial_p_value`` is exact for errors (losses 0 and 1). ``hoeffding_bentkus_p_value`` serves any loss in [0, 1]
(Bates et al. 2021, "Distribution-free, risk-controlling prediction sets", section 3.1). Both are valid for every number
of rows: if the risk exceeds the limit, the probability of a p-value of at most delta is at most delta.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import binom

from hf_bayes.metrics.functions import vector_of


def binomial_p_value(errors: ArrayLike, limit: float) -> float:
    """Return P(Binomial(n, limit) <= k) for k errors among n rows; 1 without rows."""
    values = np.asarray(errors, dtype=np.float64)
    return float(binom.cdf(values.sum(), len(values), limit)) if len(values) else 1.0


def hoeffding_bentkus_p_value(losses: ArrayLike, limit: float) -> float:
    """Return min(exp(-n h(min(R, limit), limit)), e P(Binomial(n, limit) <= ceil(n R))), 1 without rows.

    R is the mean loss and h(a, b) the KL divergence between Bernoulli variables of means a and b.
    """
    values = np.asarray(losses, dtype=np.float64)
    if not len(values):
        return 1.0
    num_rows, risk = len(values), float(values.mean())
    hoeffding = math.exp(-num_rows * _divergence(min(risk, limit), limit))
    # 1e-9: a sum of losses that is an integer must not be rounded up by its error in float64
    bentkus = math.e * float(binom.cdf(math.ceil(values.sum() - 1e-9), num_rows, limit))
    return min(1.0, hoeffding, bentkus)


def p_value(losses: ArrayLike, limit: float) -> float:
    """Return the exact p-value for errors, and the Hoeffding-Bentkus p-value for other losses in [0, 1]."""
    values = np.asarray(losses, dtype=np.float64)
    return (binomial_p_value if np.isin(values, (0, 1)).all() else hoeffding_bentkus_p_value)(values, limit)


def rows_needed(limit: float, failure_rate: float) -> int:
    """Return the smallest number of rows without an error whose exact p-value is at most ``failure_rate``."""
    return math.ceil(math.log(failure_rate) / math.log1p(-limit))


def losses_of(name: str, values: ArrayLike) -> np.ndarray:
    """Return losses as a vector.

    Raises:
        ValueError: for losses outside [0, 1].
    """
    losses = vector_of(name, values)
    if losses.min() < 0 or losses.max() > 1:
        raise ValueError(
            f"{name} must be in [0, 1], got values in [{losses.min():g}, {losses.max():g}]: give 1 for an error and 0 "
            "for a right answer, or divide by the largest possible loss"
        )
    return losses


def _divergence(a: float, b: float) -> float:
    first = a * math.log(a / b) if a > 0 else 0.0
    return first + ((1 - a) * math.log((1 - a) / (1 - b)) if a < 1 else 0.0)
