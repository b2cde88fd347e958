"""Microcanonical chains: the move, its energy, and the page."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor

from scripts.reproduce import microcanonical
from scripts.reproduce.gold_chains import Gold, whitened
from scripts.reproduce.gold_targets import RECIPES
from scripts.reproduce.microcanonical import PAGE, SETTINGS, Chains, Posterior, Setting, blocks, measured, turned
from scripts.reproduce.report import RESULTS
from tests.scripts.test_golds import small_target


def posterior() -> Posterior:
    rows = small_target()
    return Posterior(rows, whitened(rows))


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_a_velocity_turns_as_the_equation_says() -> None:
    u, gradient, length = normal(3, 5), 10 * normal(3, 5), 0.3
    u = u / u.norm(dim=1, keepdim=True)
    found, kinetic = turned(u, gradient, length)
    norm = gradient.norm(dim=1, keepdim=True)
    e, a = -gradient / norm, length * norm / 4
    along = (e * u).sum(1, keepdim=True)
    below = a.cosh() + along * a.sinh()
    torch.testing.assert_close(found, (u + e * (a.sinh() + along * (a.cosh() - 1))) / below, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(kinetic, 4 * below[:, 0].log(), rtol=1e-10, atol=1e-12)


def test_the_gradient_is_that_of_the_energy() -> None:
    subject = posterior()
    v = 0.5 * torch.randn(2, subject.dim, generator=torch.Generator().manual_seed(1))
    v.requires_grad_()
    numbers = torch.tensor([[0, 3, 5], [1, 1, 2]])
    energy, found = subject.controlled(v, numbers)
    (expected,) = torch.autograd.grad(energy.sum(), v)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)  # float32
    every = torch.arange(subject.rows.num_rows).expand(2, -1)
    torch.testing.assert_close(subject.gradient(v, every)[0].double(), subject.about.energy(v), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("right", [True, False])
def test_an_update_nearly_keeps_the_energy_of_its_batch(monkeypatch: pytest.MonkeyPatch, right: bool) -> None:
    """The integrator is of second order: an update changes the energy by about s^3, and its variance by s^6."""
    if not right:  # the broken twin: a kinetic energy that is half as large
        halved = lambda *given: (lambda u, kinetic: (u, kinetic / 2))(*turned(*given))  # noqa: E731
        monkeypatch.setattr(microcanonical, "turned", halved)
    subject, rng = posterior(), torch.Generator().manual_seed(0)
    chains = Chains(subject, Setting(True, "batch"), torch.ones(subject.dim), rng)
    large, small = (chains.energy_variance(step) for step in (0.4, 0.2))
    assert (large / small > 2**5) == right


def test_mirrored_chains_start_on_opposite_sides() -> None:
    subject = posterior()
    setting = Setting(True, "heating", mirrored=True)
    chains = Chains(subject, setting, torch.ones(subject.dim), torch.Generator().manual_seed(0))
    assert torch.equal(chains.v[::2], -chains.v[1::2])
    assert torch.equal(chains.u[::2], -chains.u[1::2])


@pytest.mark.parametrize("label", ["SGHMC, allowed heating", "microcanonical, energy of all rows"])
def test_a_run_has_a_distance_from_its_gold(monkeypatch: pytest.MonkeyPatch, label: str) -> None:
    for name, value in {"BATCH": 2, "PILOT": 3, "PILOTS": 2, "SAMPLED": 8}.items():
        monkeypatch.setattr(microcanonical, name, value)
    subject = posterior()
    num_test = len(subject.rows.test)
    gold = Gold(torch.full((num_test, 3), 1 / 3), torch.ones(num_test), {})
    found = measured(subject, gold, SETTINGS[label])
    assert 0 < found["step"] < 10
    assert found["members"] >= microcanonical.CHAINS
    assert 0 < found["tv"] < 1


def test_the_page_has_all_runs() -> None:
    record = json.loads((RESULTS / f"{PAGE}.json").read_text())
    assert record["runs"].keys() == RECIPES.keys()
    assert all(runs.keys() == SETTINGS.keys() for runs in record["runs"].values())
    assert set(blocks(record)) == {"runs"}
