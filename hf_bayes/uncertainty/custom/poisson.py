"""Counts: y ~ Poisson(exp(f)), with one output f, the log of the expected count, for each count of a label.

The Fisher information in f is exp(f).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hf_bayes.uncertainty.custom.base import CustomLikelihood, Moments
from hf_bayes.uncertainty.custom.heteroscedastic import check_sizes


@dataclass(frozen=True)
class Poisson(CustomLikelihood):
    """Counts 0, 1, 2, ... with the log of their expectation as output.

    Attributes:
        num_counts: D, the number of counts in a label, which are independent given the outputs.
    """

    name: ClassVar[str] = "poisson"
    support: ClassVar[str] = "the counts 0, 1, 2, ..."
    advice: ClassVar[str] = "The outputs are logs of expected counts, and exp of an output may have overflowed"
    num_counts: int = 1

    def __post_init__(self) -> None:
        check_sizes(self.name, num_counts=self.num_counts)

    @property
    def num_outputs(self) -> int:
        return self.num_counts

    @property
    def label_size(self) -> int:
        return self.num_counts

    def log_prob(self, outputs: Tensor, labels: Tensor) -> Tensor:
        counts = labels[..., None] if self.num_counts == 1 else labels
        return (counts * outputs - outputs.exp() - torch.lgamma(counts + 1)).sum(-1)

    def predict(self, outputs: Tensor) -> Moments:
        rate = outputs.exp()
        return Moments(rate, rate)

    def outside(self, labels: Tensor) -> Tensor:
        return ~labels.isfinite() | (labels < 0) | (labels != labels.round())

    def max_log_prob(self) -> float:
        return 0.0

    def draw(self, outputs: Tensor, uniforms: Tensor) -> Tensor:
        """Return the smallest k with P(Y <= k) > u, by bisection. P(Y <= k) = Q(k + 1, rate), a gamma function."""
        rate = outputs.double().exp().view(uniforms.shape)
        uniforms = uniforms.double()
        low = torch.full_like(rate, -1.0)
        high = (rate + 12 * rate.sqrt() + 40).ceil()  # P(Y > high) is below the spacing of float64 uniforms
        for _ in range(math.ceil(math.log2(float(high.max()) + 2)) if rate.numel() else 0):
            middle = ((low + high) / 2).floor()
            enough = torch.special.gammaincc(middle + 1, rate) > uniforms
            low, high = torch.where(enough, low, middle), torch.where(enough, middle, high)
        return high.to(outputs.dtype)

    def fisher(self, outputs: Tensor) -> Tensor:
        return torch.diag_embed(outputs.exp())
