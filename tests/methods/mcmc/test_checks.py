from __future__ import annotations

import pytest

from hf_bayes.methods.mcmc.checks import check_temperature


def test_a_kernel_refuses_temperature_zero_only() -> None:
    check_temperature("hmc", 1e-6)
    with pytest.raises(ValueError, match=r'^hmc: temperature must be > 0, got 0.0: .* Use method="map" to optimise$'):
        check_temperature("hmc", 0.0)
