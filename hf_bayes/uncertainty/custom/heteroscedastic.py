"""Regression with noise that depends on the input: y ~ N(m(x), v(x)) (Nix and Weigend 1994).

The outputs are D means and D log-variances s, with v = min_std^2 + exp(s). The Fisher information in (m, s) is

    diag(1 / v,  (exp(s) / v)^2 / 2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hf_bayes.core.number_checks import is_count, is_finite_number
from hf_bayes.uncertainty.custom.base import CustomLikelihood, Moments


@dataclass(frozen=True)
class Heteroscedastic(CustomLikelihood):
    """Numbers with a mean and a variance of their own for each input; the head has 2 D outputs.

    Attributes:
        num_numbers: D, the number of numbers in a label.
        min_std: the smallest standard deviation of the noise, in units of the labels. It bounds the density.
    """

    name: ClassVar[str] = "heteroscedastic"
    advice: ClassVar[str] = "Standardise the labels, raise Heteroscedastic(min_std=...), or lower the learning rate"
    num_numbers: int = 1
    min_std: float = 1e-3

    def __post_init__(self) -> None:
        check_sizes(self.name, num_numbers=self.num_numbers)
        check_min_std(self.name, self.min_std)

    @property
    def num_outputs(self) -> int:
        return 2 * self.num_numbers

    @property
    def label_size(self) -> int:
        return self.num_numbers

    def log_prob(self, outputs: Tensor, labels: Tensor) -> Tensor:
        mean, variance = self.predict(outputs)
        residual = (labels[..., None] if self.num_numbers == 1 else labels) - mean
        terms = residual.square() / variance + variance.log() + math.log(2 * math.pi)
        return -0.5 * terms.sum(-1)

    def predict(self, outputs: Tensor) -> Moments:
        mean, log_variance = outputs.chunk(2, -1)
        return Moments(mean, self.min_std**2 + log_variance.exp())

    def max_log_prob(self) -> float:
        return self.num_numbers * (-math.log(self.min_std) - 0.5 * math.log(2 * math.pi))

    def draw(self, outputs: Tensor, uniforms: Tensor) -> Tensor:
        mean, variance = self.predict(outputs)
        noise = standard_normal(uniforms).to(mean.dtype)
        return (mean + variance.sqrt() * noise.view(mean.shape)).view(uniforms.shape)

    def fisher(self, outputs: Tensor) -> Tensor:
        variance = self.predict(outputs).variance
        share = (variance - self.min_std**2) / variance
        return torch.diag_embed(torch.cat([1 / variance, share.square() / 2], -1))


def check_sizes(name: str, **sizes: int) -> None:
    """Raise a ValueError for a number of parts that is not 1 or more."""
    for field, value in sizes.items():
        if not is_count(value) or value < 1:
            raise ValueError(f"{name}: {field} must be an integer >= 1, got {value!r}")


def check_min_std(name: str, min_std: float) -> None:
    """Raise a ValueError for a smallest standard deviation that is not positive."""
    if not is_finite_number(min_std) or min_std <= 0:
        raise ValueError(
            f"{name}: min_std must be a number > 0, got {min_std!r}: without a smallest standard deviation the density "
            "has no upper bound, and no posterior exists"
        )


def standard_normal(uniforms: Tensor) -> Tensor:
    """Return float64 standard normal numbers, by inverting the distribution function at ``uniforms`` in [0, 1)."""
    # a uniform of exactly 0 or 1 would give an infinite number
    normal: Tensor = torch.special.ndtri(uniforms.double().clamp(2.0**-60, 1 - 2.0**-53))
    return normal
