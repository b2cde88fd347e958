"""The method of a run, for every registered method: what it refuses, the shapes and random numbers of its draws."""

from __future__ import annotations

import dataclasses
import math
import warnings

import pytest
import torch
from torch import Tensor

from hf_bayes.chains.sampling import sample
from hf_bayes.core.rng import generator
from hf_bayes.methods import assembly
from hf_bayes.methods.assembly import assemble
from tests.methods.conformance import MEAN, N, Row, cold, gaussian, noisy, on_energies, problem, rows, run, starts

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@rows
@pytest.mark.parametrize("field", ["num_data", "learning_rate"])
def test_it_refuses_problems_without_scale(row: Row, field: str) -> None:
    for value in (0, -1.0, math.nan, math.inf, None):
        with pytest.raises(ValueError, match=rf"{row.config.name}: {field} must be a finite number > 0, got"):
            assemble(row.config, problem(**{field: value}))


@rows
def test_a_warm_start_longer_than_burn_in_is_refused(row: Row) -> None:
    with pytest.raises(ValueError, match=r"warm_start_steps=6 count as burn-in, which is 5 of 10 updates"):
        assemble(dataclasses.replace(row.config, warm_start_steps=6), problem())


@cold
def test_samplers_warn_that_zero_temperature_draws_no_samples(row: Row) -> None:
    if row.law is None:  # an optimiser is at T = 0 by nature
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assemble(row.config, problem())
        return
    for temper, goal in (("posterior", "posterior"), ("likelihood", "likelihood")):
        config = dataclasses.replace(row.config, temperature=0.0, temper=temper)
        with pytest.warns(UserWarning, match=f"temperature 0 maximises the {goal}: its draws are no posterior samples"):
            assemble(config, problem())


# -- shapes and types


@on_energies
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("device", DEVICES)
def test_shapes_dtype_and_device_follow_theta(row: Row, dtype: torch.dtype, device: str) -> None:
    result = run(row, starts(3, 5, dtype, device))
    mean, members = result.approximation.mean, result.approximation.sample(2, generator("members"))  # of the CPU
    assert (result.draws.shape, mean.shape, members.shape) == ((3, 8, 5), (5,), (2, 5))
    for tensor in (result.draws, mean, members, result.state.theta):
        assert (tensor.dtype, tensor.device.type) == (dtype, device)
    for name, values in result.info.items():
        assert values.shape == (12, 3), name
        assert values.device.type == device, name


@on_energies
@pytest.mark.parametrize("warm_start_steps", [0, 2])
def test_state_is_a_named_tuple_of_tensors_with_members_first(row: Row, warm_start_steps: int) -> None:
    state = run(row, starts(3, 5), warm_start_steps=warm_start_steps).state
    for name, tensor in state._asdict().items():
        assert isinstance(tensor, Tensor), name
        assert len(tensor) == 3, name
    assert state.theta.shape == (3, 5)
    assert state.step.dtype == torch.int64


@on_energies
def test_draws_are_finite_and_chains_move(row: Row) -> None:
    result = run(row, starts(3, 5), num_steps=40)
    assert result.draws.isfinite().all()
    assert (result.draws[:, -1] != starts(3, 5)).any(1).all()


# -- random numbers


@on_energies
def test_same_seed_gives_the_same_draws(row: Row) -> None:
    assert torch.equal(run(row, starts(3, 5), seed=7).draws, run(row, starts(3, 5), seed=7).draws)


@noisy
def test_another_seed_gives_other_draws_in_every_chain(row: Row) -> None:
    one, two = run(row, starts(3, 5), seed=7), run(row, starts(3, 5), seed=8)
    assert (one.draws != two.draws).flatten(1).any(1).all()


@on_energies
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_draws_of_a_chain_do_not_depend_on_the_number_of_chains(row: Row, dtype: torch.dtype) -> None:
    many = run(row, starts(5, 7, dtype)).draws
    assert torch.equal(many[:2], run(row, starts(5, 7, dtype)[:2]).draws)


def largest_correlation(row: Row) -> float:
    """Return the correlation between the moves of any two of 4 chains from one start, over 1024 equal coordinates."""
    start = torch.full((4, 1024), MEAN)

    def flat(theta: Tensor, batch: object) -> Tensor:
        return 1e-4 * gaussian(theta, batch)  # so flat that every proposal is accepted

    result = sample(flat, start, row.config, num_steps=3, learning_rate=1e-3, num_data=N, **row.data)
    moved = result.draws[:, -1] - start
    return (torch.corrcoef(moved) - torch.eye(4)).abs().max().item()


@pytest.mark.reliability("F13")
@noisy
def test_chains_are_independent(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = 4 / math.sqrt(1024)  # 4 standard errors
    assert largest_correlation(row) < limit
    # the broken twin: one seed for all chains
    monkeypatch.setattr(
        assembly,
        "chain_generators",
        lambda seed, count, **_: [generator(seed) for _ in range(count)],
    )
    assert largest_correlation(row) > limit


@on_energies
def test_global_random_state_is_neither_used_nor_moved(row: Row) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one = run(row, starts(2, 3)).draws
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert torch.equal(run(row, starts(2, 3)).draws, one)
