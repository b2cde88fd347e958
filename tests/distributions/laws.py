"""The distance of draws from a law, by Kolmogorov's statistic."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def kolmogorov_smirnov(draws: Tensor, distribution: torch.distributions.Distribution) -> float:
    """Return sqrt(n) times the largest distance of the distribution functions, for n draws in any order."""
    ordered = draws.flatten().double().sort().values
    steps = torch.arange(len(ordered) + 1).double() / len(ordered)
    law = distribution.cdf(ordered)
    return float(torch.maximum(steps[1:] - law, law - steps[:-1]).max() * math.sqrt(len(ordered)))


def laws(std: float) -> dict[str, torch.distributions.Distribution]:
    zero = torch.tensor(0.0, dtype=torch.float64)
    return {
        "gaussian": torch.distributions.Normal(zero, std),
        "laplace": torch.distributions.Laplace(zero, std / math.sqrt(2)),
    }


LIMIT = 1.95
"""The critical value of Kolmogorov's statistic at p = 0.001."""
