"""The configurational temperature where the data outweigh the prior: how wide draws are where it shows.

Let c be the mean of p(theta) ~ exp(-U / T), and B any matrix. Partial integration gives (Stein's identity)

    E_p[(theta - c)' B grad U(theta)] = T tr B

If draws have a covariance Sigma of their own and U is nearly quadratic with the Hessian H + tau, the left side is
tr(B (H + tau) Sigma). With B = H (H + tau)^-1 this is tr(H Sigma), to which the epistemic uncertainty of the training
rows is proportional. So the left side over tr B is T for draws of the posterior, and otherwise T times about the factor
by which epistemic uncertainty is too large. An approximate H makes the choice of directions approximate. The identity
stays exact.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

SPREAD_TOLERANCE = 0.15
"""The relative error of the temperature that still counts as right. Epistemic uncertainty is off by about as much."""

DRIFT_TOLERANCE = 0.2
"""The relative change of the epistemic uncertainty of training rows that is tolerated when draws of a Gaussian move by
the exact energy. On training rows it changes by about a third more than on new rows, so this is 15 % of theirs."""

MAX_SPREAD_ERROR = 0.15
"""The largest relative standard error of a measurement that counts: a less precise one could not find an error as large
as the tolerance."""


class InformedSpread(NamedTuple):
    """The configurational temperature where the data outweigh the prior.

    Attributes:
        temperature: its estimate.
        std_error: its standard error over draws.
    """

    temperature: float
    std_error: float


def informed_spread(informed: Tensor, grad_energy: Tensor, num_informed: float) -> InformedSpread:
    """Return the covariance of draws and gradients, summed over directions by their share of the data.

    The covariance does not change if all gradients have the same error, as they do if all of them come from the same
    random part of the rows.

    Args:
        informed: [S >= 2, d] B' (theta - c) of S independent draws, for any c.
        grad_energy: [S, d] grad U at these draws.
        num_informed: tr B, the number of directions where the data outweigh the prior.
    """
    count = len(informed)
    parts = [(part - part.mean(0)).double() for part in (informed, grad_energy)]
    values = (parts[0] * parts[1]).sum(1) * count / (count - 1) / num_informed
    return InformedSpread(float(values.mean()), float(values.std()) / math.sqrt(count))
