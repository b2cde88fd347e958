from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from hf_bayes.core.rng import generator
from scripts.reproduce import agps_probe
from scripts.reproduce.agps_probe import Settings, blind
from scripts.reproduce.agps_probe_digits import HIDDEN, SIZES, Digits, barrier, logits, untrained
from scripts.reproduce.agps_probe_laws import LAWS, Law
from tests.scripts.pages import page


def virial(law: Law, theta: Tensor) -> Tensor:
    """Return theta . grad U [S]. Its mean under exp(-U) is the dimension."""
    leaf = theta.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(law.energy(leaf).sum(), leaf)
    return (theta * gradient).sum(1)


@pytest.mark.parametrize("name", LAWS)
def test_draws_of_a_law_are_of_its_energy(name: str) -> None:
    found = virial(LAWS[name], LAWS[name].draw(40_000, generator("law")))
    assert found.mean() == pytest.approx(10, abs=float(5 * found.std() / 200))  # 5 standard errors
    # twin: draws of another law
    other = "correlated normals" if name == "bent" or name.startswith("two") else "bent"
    assert abs(virial(LAWS[name], LAWS[other].draw(40_000, generator("law"))).mean() - 10) > 0.5


def test_the_network_is_torchs() -> None:
    theta = untrained(2, 0) + 0.1
    w1, b1, w2, b2 = theta[1].split(SIZES)
    layers = nn.Sequential(nn.Linear(64, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 10))
    values = (w1.view(64, HIDDEN).T, b1, w2.view(HIDDEN, 10).T, b2)
    for parameter, value in zip(layers.parameters(), values, strict=True):
        parameter.data = value
    x = torch.rand(5, 64, generator=generator("x"))
    torch.testing.assert_close(logits(theta, x)[1], layers(x))


def test_a_barrier_separates_a_network_from_its_permutation() -> None:
    train, _ = Digits.split()
    theta = agps_probe.descend(untrained(1, 0), train, 60, Settings())
    w1, b1, w2, b2 = theta[0].split(SIZES)
    order = torch.arange(HIDDEN).roll(1)
    parts = (w1.view(64, HIDDEN)[:, order], b1[order], w2.view(HIDDEN, 10)[order], b2)
    permuted = torch.cat([part.flatten() for part in parts])[None]
    assert train.nll(permuted) == pytest.approx(float(train.nll(theta)), rel=1e-4)
    assert barrier(theta, permuted, train) > 0.2
    assert barrier(theta, theta + 1e-4, train) == pytest.approx(0, abs=1e-4)


def test_a_blind_walk_is_as_wide_as_its_steps() -> None:
    walk = blind(torch.zeros(4, 5000), 0.3, Settings(num_draws=6), 4)
    widths = walk.flatten(0, 0).std(2).mean(0)
    expected = [0.3 * math.sqrt(4 * draw) for draw in range(1, 7)]
    assert widths.tolist() == pytest.approx(expected, rel=0.05)  # 7 standard errors of 20000 numbers


@pytest.mark.filterwarnings("ignore:agps:UserWarning")
def test_a_small_run_fills_the_page(tmp_path: Path) -> None:
    settings = Settings(num_draws=3, repetitions=2, spacing=2, training=5, descent=3, max_stds=(0.01, 0.1))
    record = agps_probe.run(settings)
    text = page(agps_probe, record, tmp_path)
    assert "| two normals, 10 apart | 2 | a-GPS |" in text
    assert "| blind walk, 0.1 |" in text
