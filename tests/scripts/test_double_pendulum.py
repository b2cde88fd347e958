from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from scripts.reproduce import double_pendulum
from scripts.reproduce.double_pendulum import (
    BATCHED,
    PENALTY,
    SIZES,
    Batch,
    Contender,
    Energy,
    Rows,
    Settings,
    batches,
    log_lik,
    mixture_nll,
    network,
    pendulum,
    positions,
    predictive,
    run_line,
    starts,
)


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


def test_network_has_419_parameters_and_is_torchs(rows: Rows) -> None:
    theta = starts(3, seed=0) + 0.1
    assert theta.shape == (3, 419)
    layers = nn.Sequential(nn.Linear(20, 10), nn.Tanh(), nn.Linear(10, 10), nn.Tanh(), nn.Linear(10, 9))
    pieces = theta[1].split([math.prod(shape) for shape in SIZES.values()])
    for parameter, piece, shape in zip(layers.parameters(), pieces, SIZES.values(), strict=True):
        parameter.data = piece.view(shape).T if len(shape) == 2 else piece
    mean, log_std, _ = layers(rows.x).split([4, 4, 1], 1)
    torch.testing.assert_close(network(theta, rows.x)[0][1], mean)
    expected = torch.distributions.Normal(mean, log_std.exp()).log_prob(rows.y).sum(1)
    torch.testing.assert_close(log_lik(theta, rows)[1], expected)


@pytest.mark.parametrize("count", [1, 3])
def test_batch_energies_equal_their_rows_and_average_to_all(rows: Rows, count: int) -> None:
    energy, theta = Energy(rows, weight=7.0), starts(2, seed=0)
    for batch in itertools.islice(batches(30, count, 5, seed=1), 2 * count):
        alone = Energy(Rows(rows.x[batch.rows[batch.index]], rows.y[batch.rows[batch.index]]), weight=7.0)
        torch.testing.assert_close(energy(theta, batch), alone(theta, None))
    partition = torch.arange(30).view(3, 10)
    mean = torch.stack([energy(theta, Batch(partition, index)) for index in range(3)]).mean(0)
    torch.testing.assert_close(mean, energy(theta, None))


def test_another_theta_is_not_answered_from_memory(rows: Rows) -> None:
    energy, batch = Energy(rows, weight=7.0), Batch(torch.tensor([[1, 2], [3, 4]]), 0)
    assert not torch.equal(energy(starts(2, seed=0), batch), energy(starts(2, seed=1), batch))


def test_only_the_batched_line_goes_without_the_penalty(rows: Rows) -> None:
    settings = Settings(updates=8, num_draws=2)
    told = {
        penalised: run_line(
            Contender(PENALTY if penalised else BATCHED, minibatch=True, penalised=penalised),
            starts(2, seed=0), rows, settings, 0, size=5, count=4, rate=0.01,
        )[1]
        for penalised in (True, False)
    }  # fmt: skip
    assert told[True]["penalty"] > 0
    assert told[False]["penalty"] == 0


def test_scores_match_the_mixture_of_torch_distributions(rows: Rows) -> None:
    draws = starts(12, seed=0)
    mean, log_std = network(draws, rows.x)
    mixture = torch.distributions.MixtureSameFamily(
        torch.distributions.Categorical(torch.ones(30, 12)),
        torch.distributions.Independent(torch.distributions.Normal(_rows_first(mean), _rows_first(log_std.exp())), 1),
    )
    assert mixture_nll(draws, rows) == pytest.approx(float(-mixture.log_prob(rows.y).mean()), rel=1e-5)
    found = predictive(draws, rows.x)
    torch.testing.assert_close(found[0], mixture.mean)
    torch.testing.assert_close(found[1], mixture.variance.sqrt())


def _rows_first(values: Tensor) -> Tensor:
    return values.transpose(0, 1)


def test_a_small_run_fills_the_tables_and_figures(tmp_path) -> None:
    settings = Settings(
        num_rows=200, num_train=80, updates=20, training=20, num_chains=2, num_draws=4, size=10, count=10,
        sizes=(20, 40), num_seeds=2, stretch=(0, 20),
    )  # fmt: skip
    record = double_pendulum.run(settings)
    shown = double_pendulum.blocks(record)
    assert set(shown) == {"table", "others", "chains", "sizes"}
    assert all("nan" not in shown[name] for name in ("table", "sizes"))
    double_pendulum.figures(record, tmp_path)
    assert len(list(tmp_path.glob("double_pendulum*.png"))) == 3
