from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from scripts.reproduce import agps_targets
from scripts.reproduce.agps_targets_mixtures import TARGETS
from scripts.reproduce.agps_targets_samplers import methods
from tests.scripts.pages import page


@pytest.mark.parametrize("name", TARGETS)
def test_energy_and_distribution_function_share_one_law(name: str) -> None:
    target = TARGETS[name]
    x = np.array([target.quantile(p) for p in (0.1, 0.3, 0.5, 0.7, 0.9)])
    density = np.exp(-target.energy(torch.from_numpy(x)[:, None]).numpy())
    step = 1e-5 * (x[-1] - x[0])
    # central differences: relative error of the order of step^2
    assert density == pytest.approx((target.cdf(x + step) - target.cdf(x - step)) / (2 * step), rel=1e-5)


def test_unconstrained_energy_is_the_transformed_density() -> None:
    target = TARGETS["Gamma(2, 0.1)"]
    z = torch.linspace(-5, 8, 20_001, dtype=torch.float64)[:, None]
    density = (-target.unconstrained_energy(z)).exp()
    assert torch.trapezoid(density, z[:, 0]) == pytest.approx(1, abs=1e-4)  # P(x < e^-5) = 2e-7, P(x > e^8) = 0
    mean = torch.trapezoid(density * z.exp()[:, 0], z[:, 0])
    assert mean == pytest.approx(20, rel=1e-4)


def test_distances_of_draws_on_a_line_agree_with_scipy() -> None:
    target = TARGETS["Beta(5, 5)"]
    values = stats.beta(5, 4).rvs(500, random_state=0)
    found = target.distances(values)
    exact = stats.beta(5, 5).ppf((np.arange(200_000) + 0.5) / 200_000)
    low, first, third, high = (target.quantile(p) for p in (0.005, 0.25, 0.75, 0.995))
    expected = stats.wasserstein_distance(values.clip(low, high), exact.clip(low, high)) / (third - first)
    assert found["wasserstein"] == pytest.approx(expected, rel=1e-3)
    assert found["ks"] == stats.kstest(values, "beta", (5, 5)).statistic


def test_the_agps_experiment_runs_without_pyro(tmp_path: Path) -> None:
    record = agps_targets.run(num_draws=20, burn_in=10, replications=3, baselines=0)
    text = page(agps_targets, record, tmp_path)
    assert "| N(2, 4) | a-GPS | 3 |" in text
    assert "| Beta(0.5, 0.5) | GPS, exact | 3 |" in text


def test_baselines_without_pyro_are_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyro", None)
    with pytest.raises(ImportError, match=r"pip install \"hf-bayes\[reproduce\]\""):
        agps_targets.run(baselines=1)


def test_nuts_and_mala_of_pyro_find_a_gamma() -> None:
    pytest.importorskip("pyro", reason='the baselines are Pyro\'s: pip install "hf-bayes[reproduce]"')
    target = TARGETS["Gamma(2, 0.1)"]
    for name in ("NUTS", "MALA"):
        found = methods(200)[name](target, 1, 400, 1)
        assert found.draws.shape == (1, 400)
        # the 99.9 % quantile of KS at 400 draws is 0.097; with an ESS of 100, 0.195
        assert target.distances(found.draws.flatten().numpy())["ks"] < 0.195
