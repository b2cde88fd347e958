from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from scripts.reproduce import double_pendulum
from scripts.reproduce.double_pendulum import LABELS
from scripts.reproduce.double_pendulum_contenders import (
    BATCHED,
    CONTENDERS,
    L2,
    PENALTY,
    RANDOM_WALK,
    Contender,
    starts,
)
from scripts.reproduce.double_pendulum_data import Rows, pendulum, positions
from scripts.reproduce.double_pendulum_runs import Settings, run_line, saved_and_loaded, scores, train


def drift(y: np.ndarray, step: float, *, gravity: float) -> float:
    """Return the largest change of the energy of two masses of 1 kg, over its range, by central differences."""
    velocity = (y[2:] - y[:-2]) / (2 * step)
    potential = gravity * (y[1:-1, 1] + y[1:-1, 3])
    kinetic = 0.5 * (velocity**2).sum(1)
    return float(np.ptp(kinetic + potential) / np.ptp(potential))


def test_simulation_conserves_energy() -> None:
    step = 1e-3
    y = positions(3000, step=step)
    assert drift(y, step, gravity=9.81) < 1e-3  # O(step^2) of the differences
    assert drift(y, step, gravity=9.0) > 0.05  # what a wrong force would look like
    rods = np.stack([y[:, :2], y[:, 2:] - y[:, :2]])
    np.testing.assert_allclose((rods**2).sum(2), 1, atol=1e-12)


def test_rows_are_the_papers() -> None:
    train, test = pendulum(num_rows=60, num_train=20)
    y = positions(60 + 24)
    assert (len(train.y), len(test.y)) == (20, 40)
    np.testing.assert_allclose(train.y[0], y[24], atol=1e-6)
    np.testing.assert_allclose(train.x[0], np.concatenate([y[4], y[3], y[2], y[1], y[0]]), atol=1e-6)  # eq. 18
    np.testing.assert_allclose(test.y[-1], y[-1], atol=1e-6)


@pytest.fixture
def rows() -> Rows:
    rng = torch.Generator().manual_seed(0)
    return Rows(torch.randn(30, 20, generator=rng), torch.randn(30, 4, generator=rng))


def by_torch(theta: Tensor, rows: Rows) -> torch.distributions.Independent:
    """Return the normal density [M, R] of the labels under networks theta [M, 419], one network at a time."""
    means, stds = [], []
    for member in theta:
        layers = nn.Sequential(nn.Linear(20, 10), nn.Tanh(), nn.Linear(10, 10), nn.Tanh(), nn.Linear(10, 9))
        nn.utils.vector_to_parameters(member, layers.parameters())
        _, mean, log_std = layers(rows.x).split([1, 4, 4], 1)
        means.append(mean)
        stds.append(log_std.exp())
    return torch.distributions.Independent(torch.distributions.Normal(torch.stack(means), torch.stack(stds)), 1)


def test_starts_have_419_parameters_and_unit_fan_in() -> None:
    theta = starts(500, seed=0)
    assert theta.shape == (500, 419)
    weights, biases = theta[:, :200], theta[:, 200:210]
    assert float(weights.std()) == pytest.approx(20**-0.5, rel=0.02)  # 9 standard errors of 100,000 numbers
    assert not biases.any()


@pytest.mark.parametrize("weight", [None, 7.0])
def test_the_chains_sample_the_papers_energy(rows: Rows, weight: float | None) -> None:
    start = starts(3, seed=0)
    state = train(RANDOM_WALK, start, rows, steps=1, rate=0.01, seed=0, weight=weight).run.state

    def energy(theta: Tensor, rows_in_all: float) -> Tensor:
        """Return the energies [M] up to the prior's normaliser, which differences between chains do not have."""
        found = L2 * theta.square().sum(1) - rows_in_all * by_torch(theta, rows).log_prob(rows.y).mean(1)
        return (found - found[0]).double()

    expected = energy(state.theta, weight or 30)
    torch.testing.assert_close((state.energy - state.energy[0]).double(), expected, rtol=1e-5, atol=1e-4)  # float32
    assert (energy(state.theta, 29 if weight is None else 30) - expected).abs().max() > 0.01  # the twin


def test_an_update_has_the_papers_batches(rows: Rows) -> None:
    trainer = train(PENALTY, starts(2, seed=0), rows, steps=1, rate=0.01, seed=0, weight=5, size=5, count=4)
    sizes = {tuple(batch["labels"].shape) for batch in trainer.get_train_dataloader()}
    assert sizes == {(5, 4)}  # the same rows for all chains
    assert trainer.get_total_train_batch_size(trainer.args) == 20
    assert trainer.rows.num_data == 5


def test_only_the_batched_line_goes_without_the_penalty(rows: Rows) -> None:
    settings = Settings(updates=8, num_draws=2)
    told = {
        method: run_line(
            Contender(method), starts(2, seed=0), (rows, rows), settings, 0, size=5, count=4, rate=0.01
        ).numbers
        for method in (PENALTY, BATCHED)
    }
    assert told[PENALTY]["penalty"] > 0
    assert told[BATCHED]["penalty"] == 0


def test_scores_of_a_loaded_posterior_are_the_mixtures(rows: Rows) -> None:
    method = dataclasses.replace(RANDOM_WALK, draws_per_chain=4)
    trainer = train(method, starts(3, seed=0), rows, steps=16, rate=0.05, seed=0)
    model = saved_and_loaded(trainer)
    components = by_torch(torch.as_tensor(trainer.posterior.approximation.theta), rows)
    last = torch.distributions.Independent(
        torch.distributions.Normal(
            components.base_dist.loc.transpose(0, 1), components.base_dist.scale.transpose(0, 1)
        ),
        1,
    )
    mixture = torch.distributions.MixtureSameFamily(torch.distributions.Categorical(torch.ones(30, 12)), last)
    found = scores(model, 3, rows, rows)
    assert found["test"] == pytest.approx(float(-mixture.log_prob(rows.y).mean()), rel=1e-5)
    covered = ((rows.y - mixture.mean).abs() <= mixture.variance.sqrt()).float().mean()
    assert found["coverage"] == pytest.approx(float(covered))
    levels = -components.log_prob(rows.y).mean(1).view(3, 4)
    assert found["first"] == pytest.approx(float(levels[:, 0].mean()), rel=1e-5)  # chain by chain
    assert found["last"] == pytest.approx(float(levels[:, -1].mean()), rel=1e-5)


def test_a_small_run_fills_the_tables_and_figures(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(double_pendulum, "CONTENDERS", {name: CONTENDERS[name] for name in LABELS})
    settings = Settings(
        num_rows=200, num_train=80, updates=20, training=20, num_chains=2, num_draws=4, size=10, count=10,
        sizes=(20, 40), num_seeds=1, stretch=(0, 20),
    )  # fmt: skip
    record = double_pendulum.run(settings)
    shown = double_pendulum.blocks(record)
    assert set(shown) == {"table", "others", "chains", "sizes"}
    assert all("nan" not in shown[name] for name in ("table", "sizes"))
    double_pendulum.figures(record, tmp_path)
    assert len(list(tmp_path.glob("double_pendulum*.png"))) == 3
