"""The interface that a user writes, with the example of its docstring."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hf_bayes.uncertainty.custom.base import CustomLikelihood, Moments
from hf_bayes.uncertainty.custom.ordinal import Ordinal
from hf_bayes.uncertainty.custom.poisson import Poisson
from hf_bayes.uncertainty.custom.weighted import Weighted


@dataclass(frozen=True)
class DoubleExponential(CustomLikelihood):
    """Numbers with double exponential noise."""

    name: ClassVar[str] = "double_exponential"
    scale: float = 1.0

    def log_prob(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return -(labels - outputs[..., 0]).abs() / self.scale - math.log(2 * self.scale)

    def predict(self, outputs: Tensor) -> Moments:
        return Moments(outputs, torch.full_like(outputs, 2 * self.scale**2))


def test_two_methods_make_a_density() -> None:
    grid = torch.linspace(-30, 30, 60_001, dtype=torch.float64)
    density = DoubleExponential(scale=1.5).log_prob(torch.zeros(1, 1, dtype=torch.float64), grid).exp()
    # the trapezoidal rule with steps of 1e-3
    assert abs(float(torch.trapezoid(density, grid)) - 1) < 1e-6


def test_fields_are_json_values() -> None:
    assert Ordinal(num_classes=3, cutpoints=(0.0, 1.0)).to_dict() == {
        "name": "ordinal", "num_classes": 3, "cutpoints": [0.0, 1.0],
    }  # fmt: skip
    assert Weighted(Poisson()).to_dict()["of"] == {"name": "poisson", "num_counts": 1}


def test_labels_that_are_not_finite_are_outside() -> None:
    assert DoubleExponential().outside(torch.tensor([0.0, math.nan, math.inf])).tolist() == [False, True, True]
