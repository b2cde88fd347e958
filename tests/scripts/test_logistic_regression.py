from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hf_bayes.core.rng import generator
from scripts.reproduce import logistic_regression
from scripts.reproduce.logistic_regression import same_density
from scripts.reproduce.logistic_regression_model import BATCH, Rows, breast_cancer, pyro_energy
from scripts.reproduce.stein_discrepancy import stein_discrepancy as discrepancy
from tests.scripts.pages import page


@pytest.fixture(scope="module")
def rows() -> Rows:
    return breast_cancer()


def normals(num_draws: int, dim: int = 3) -> Tensor:
    return torch.randn(num_draws, dim, dtype=torch.float64, generator=generator("normals"))


def test_the_stein_kernel_applies_the_operator_to_both_arguments() -> None:
    """Autograd gives T_x T_y k with T f = f s + grad f, for every pair."""
    theta = normals(4)
    score = theta.cos()
    total = 0.0
    for x, s in zip(theta, score, strict=True):
        for y, t in zip(theta, score, strict=True):

            def kernel(x: Tensor, y: Tensor) -> Tensor:
                return (1 + (x - y).square().sum() / 3) ** -0.5

            by_x, by_y = torch.func.grad(kernel, 0)(x, y), torch.func.grad(kernel, 1)(x, y)
            mixed = torch.func.jacfwd(torch.func.grad(kernel, 0), 1)(x, y).trace()
            total += float(s @ t * kernel(x, y) + s @ by_y + t @ by_x + mixed)
    assert discrepancy(theta, score) == pytest.approx(math.sqrt(total / 16), rel=1e-12)


def test_the_stein_discrepancy_is_noise_for_exact_draws_only() -> None:
    theta = normals(800)
    # E KSD^2 = E k_p(x, x) / S = (E|s|^2 + 1) / S = 4 / 800
    assert discrepancy(theta, -theta) == pytest.approx(math.sqrt(4 / 800), rel=0.4)
    assert discrepancy(1.3 * theta, -1.3 * theta) > 3 * math.sqrt(4 / 800)
    assert discrepancy(theta + 0.3, -theta - 0.3) > 3 * math.sqrt(4 / 800)


def test_the_energy_of_minibatches_averages_to_that_of_all_rows(rows: Rows) -> None:
    some = Rows(rows.x[: 4 * BATCH], rows.y[: 4 * BATCH])
    theta = normals(2, 11)
    parts = torch.stack([some.energy(theta, picked) for picked in some.batches(2)()])
    assert len(parts) == 4
    assert torch.allclose(parts.mean(0), some.energy(theta, None), rtol=1e-12)


def test_the_logistic_regression_experiment_runs_without_pyro(tmp_path: Path) -> None:
    sizes = {"seeds": 2, "num_draws": 8, "updates": 60, "batched_updates": 180, "kernel_updates": 20}
    with pytest.raises(ValueError, match="HMC in 4 chains of 20 updates cannot serve as a reference: R-hat"):
        logistic_regression.run(**sizes, reference_chains=4, with_nuts=False)
    record = logistic_regression.run(**sizes, reference_chains=4, with_nuts=False, check_reference=False)
    text = page(logistic_regression, record, tmp_path)
    assert "| sgnht, batch 32 | 180 |" in text
    assert len(record["methods"]["laplace"]["ksd"]) == 2


def test_the_density_of_a_pyro_model_is_the_one_written_by_hand(rows: Rows) -> None:
    pytest.importorskip("pyro", reason='compares with a Pyro model: pip install "hf-bayes[reproduce]"')
    theta, energy = 0.3 * normals(3, 11), pyro_energy(rows)
    # Pyro's prior is normalised, ours is not
    constant = 11 / 2 * math.log(2 * math.pi)
    for picked in (None, next(rows.batches(3)())):
        assert torch.allclose(energy(theta, picked) - constant, rows.energy(theta, picked), rtol=1e-12)
    # twin: a minibatch that the plate does not scale up
    picked = next(rows.batches(3)())
    unscaled = Rows(rows.x[:BATCH], rows.y[:BATCH]).energy(theta, None)
    assert not torch.allclose(energy(theta, picked) - constant, unscaled, rtol=0.1)


def test_sample_draws_the_same_from_the_density_of_a_pyro_model(rows: Rows) -> None:
    pytest.importorskip("pyro", reason='compares with a Pyro model: pip install "hf-bayes[reproduce]"')
    assert same_density(rows, 3, 60)["difference"] < 1e-10  # float64's rounding over 60 updates
