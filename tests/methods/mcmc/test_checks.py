from __future__ import annotations

import math

import pytest
import torch

from hf_bayes.methods.mcmc.checks import check_start, check_temperature


def test_a_kernel_refuses_temperature_zero_only() -> None:
    check_temperature("hmc", 1e-6)
    with pytest.raises(ValueError, match=r'^hmc: temperature must be > 0, got 0.0: .* Use method="map" to optimise$'):
        check_temperature("hmc", 0.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_start_that_is_not_finite_names_its_chain(bad: float) -> None:
    energy, gradient = torch.tensor([1.0, 2.0, 3.0]), torch.zeros(3, 2)
    check_start("hmc", energy, gradient)
    gradient[1, 1] = bad
    with pytest.raises(FloatingPointError, match=r"hmc: chain 1 starts where the energy \(2\) .* \(1 of 3 chains do\)"):
        check_start("hmc", energy, gradient)
    with pytest.raises(FloatingPointError, match=rf"gps: chain 0 .* energy \({bad:g}\) .* \(2 of 3 chains do\)"):
        check_start("gps", torch.tensor([bad, 1.0, bad]))
