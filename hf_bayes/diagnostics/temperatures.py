"""Intervals of the kinetic temperature: where it lies by chance if the momenta have their law."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

KINETIC_TOLERANCE = 0.1
"""A relative error of the kinetic temperature that is accepted even outside the chi-square interval. With a million
parameters the interval is +-0.4 %, and the law ignores gradient noise and curvature."""


@functools.cache
def kinetic_temperature_interval(dim: int, temperature_law: float, *, confidence: float = 0.99) -> tuple[float, float]:
    """Return the interval that contains the kinetic temperature m^T M^-1 m / d of one state with probability c.

    The bounds are T_law / d times the quantiles (1 -+ c) / 2 of chi^2(d) (cold_posteriors eqs 40-42). The paper has
    T_law = T. At a finite step size the momentum has the variance of the discretisation, 2 T / (1 + beta) for SGHMC,
    and T_law is this value.

    Args:
        dim: d, the number of coordinates in the estimate.
        temperature_law: T_law, the expected kinetic temperature.
        confidence: c.
    """
    from scipy.stats import chi2

    low, high = chi2.ppf([(1 - confidence) / 2, (1 + confidence) / 2], dim)
    return temperature_law * float(low) / dim, temperature_law * float(high) / dim


def widened_interval(dim: int, law: float, tolerance: float, *, confidence: float = 0.99) -> tuple[float, float]:
    """Return ``kinetic_temperature_interval``, widened to contain law (1 -+ tolerance)."""
    low, high = kinetic_temperature_interval(dim, law, confidence=confidence)
    return min(low, (1 - tolerance) * law), max(high, (1 + tolerance) * law)


def share_within_interval(
    temperatures: Tensor,
    sizes: Sequence[int],
    temperature_law: Tensor,
    *,
    confidence: float = 0.99,
    tolerance: float = 0.0,
) -> Tensor:
    """Return the share of each chain's tensors whose kinetic temperature is in its ``kinetic_temperature_interval``.

    If the momenta have their law, the expected share is the confidence. cold_posteriors (app. I.1) compares tensor by
    tensor, because a tensor that is too hot does not show in the mean over millions of coordinates. Means over many
    updates lie in the interval of a single state more often.

    Args:
        temperatures: [M, S] the kinetic temperature of each chain and tensor.
        sizes: the number of elements of each tensor.
        temperature_law: [M] the expected kinetic temperature.
        confidence: c.
        tolerance: see ``widened_interval``.
    Returns:
        [M] float64.
    """
    bounds = {size: widened_interval(size, 1.0, tolerance, confidence=confidence) for size in set(sizes)}
    low, high = torch.tensor([bounds[size] for size in sizes]).to(temperatures).unbind(1)
    relative = temperatures / temperature_law.to(temperatures)[:, None]
    return ((low <= relative) & (relative <= high)).double().mean(1)
