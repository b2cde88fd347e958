from __future__ import annotations

import math

import pytest
import torch

from hf_bayes.core.rng import generator
from hf_bayes.diagnostics.temperatures import kinetic_temperature_interval


def test_kinetic_temperature_interval_has_its_promised_coverage() -> None:
    law = 2 / 1.9
    kinetic = law * torch.randn(20_000, 30, generator=generator("draws"), dtype=torch.float64).square().mean(1)
    error = math.sqrt(0.9 * 0.1 / 20_000)  # standard error of the share

    def coverage(low: float, high: float) -> float:
        return ((low < kinetic) & (kinetic < high)).double().mean().item()

    assert abs(coverage(*kinetic_temperature_interval(30, law, confidence=0.9)) - 0.9) < 4 * error
    # the twins: T in place of the discretisation's law, and one degree of freedom for each pair
    assert abs(coverage(*kinetic_temperature_interval(30, 1.0, confidence=0.9)) - 0.9) > 4 * error
    assert abs(coverage(*kinetic_temperature_interval(15, law, confidence=0.9)) - 0.9) > 4 * error


def test_the_kinetic_interval_is_that_of_the_tables() -> None:
    low, high = kinetic_temperature_interval(10, 2.0)
    assert low == pytest.approx(2.156 / 5, rel=1e-3)  # chi^2(10): 0.005 and 0.995 quantiles 2.156 and 25.188
    assert high == pytest.approx(25.188 / 5, rel=1e-4)
    low, high = kinetic_temperature_interval(1_000_000, 1.0)
    assert high - 1 == pytest.approx(2.5758 * math.sqrt(2e-6), rel=1e-2)  # normal for large d
