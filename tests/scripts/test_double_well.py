from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hf_bayes.core.rng import generator
from scripts.reproduce import double_well
from tests.scripts.pages import page


@pytest.fixture(scope="module")
def well() -> double_well.Well:
    return double_well.Well(tilt=0.25)


def test_the_wells_of_a_double_well_are_those_of_a_fine_grid(well: double_well.Well) -> None:
    points = torch.linspace(-6, 6, 1201, dtype=torch.float64)
    plane = torch.cartesian_prod(points, points)
    mass = (-well.energy(plane, None)).exp().view(1201, 1201)
    mass = mass * torch.where(points == 0, 0.5, 1.0) * torch.where(points == 0, 0.5, 1.0)[:, None]
    left = (points <= 0).double()
    expected = torch.stack([left, 1 - left]) @ mass @ torch.stack([left, 1 - left]).T / mass.sum()
    # the row at 0 counts half, but on one side only: 0.5 * 0.01 * density(0) = 0.0003
    assert torch.allclose(well.cells(torch.zeros(1, dtype=torch.float64)), expected, atol=6e-4)


def test_distances_are_small_only_for_draws_of_the_same_well(well: double_well.Well) -> None:
    draws = well.draw(20_000, generator("draws"))
    distances = well.distances(draws)
    # E |F_n - F| <= 1 / (2 sqrt(n)) = 0.0035 over a width of about 7; shares of 4 wells to about 1 / sqrt(n)
    assert distances["wasserstein"] < 0.025
    assert distances["wells"] < 0.015
    broken = double_well.Well(tilt=0.0).distances(draws)
    assert broken["wasserstein"] > 0.5
    assert broken["wells"] > 0.2


def test_wasserstein_of_a_double_well_is_the_mean_shift(well: double_well.Well) -> None:
    draws = well.draw(50_000, generator("draws"))
    assert well.distances(draws + 0.5)["wasserstein"] == pytest.approx(0.5, abs=0.03)


def test_the_double_well_experiment_runs(tmp_path: Path) -> None:
    record = double_well.run(num_draws=20, updates=50, seeds=2, shown=10)
    text = page(double_well, record, tmp_path)
    assert text.count("| parallel SGHMC |") == 2
    assert len(record["laws"]["tilted"]["serial SGHMC"]["draws"]) == 10
