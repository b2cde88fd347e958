from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_bayes.chains.energy_objective import EnergyObjective
from hf_bayes.core.config import MethodConfig
from hf_bayes.methods.averaging.map import MAPConfig
from hf_bayes.methods.mcmc.gps import GPSConfig
from hf_bayes.methods.mcmc.hmc import HMCConfig
from hf_bayes.methods.mcmc.metropolis import MetropolisConfig
from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from hf_bayes.methods.sgmcmc.sgld import SGLDConfig
from hf_bayes.methods.variational.mean_field import MeanFieldConfig
from tests.chains.bowl import bowl, run


@pytest.mark.parametrize(
    "write",
    [
        lambda theta: theta.add_(1),
        lambda theta: theta.__setitem__((slice(None), 0), 0.0),
        lambda theta: theta.data.mul_(2),
    ],
    ids=["add_", "setitem", "data"],
)
@pytest.mark.parametrize("method", [SGLDConfig(), MetropolisConfig(), HMCConfig()], ids=lambda method: method.name)
def test_an_energy_that_writes_into_theta_is_refused(write: Callable[[Tensor], Any], method: MethodConfig) -> None:
    def energy(theta: Tensor, batch: object) -> Tensor:
        write(theta)
        return bowl(theta, batch)

    with pytest.raises(ValueError, match=r"energy must not change theta, .* got an energy that writes into it"):
        run(energy, method=method)


def failing_cholesky(theta: Tensor, batch: object) -> Tensor:
    """theta ~ N(0, 1) where [[1, theta], [theta, 1]] is positive definite; two other coordinates of no consequence."""
    off = theta[:, 0, None, None] * torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    factor = torch.linalg.cholesky(torch.eye(2) + off)
    return bowl(theta, batch) + 0 * factor.sum((1, 2))


def failing_constraint(theta: Tensor, batch: object) -> Tensor:
    """theta ~ N(0, 1) on (-1, 1), by the constraint of a scale."""
    scale = 1 - theta[:, 0].square()
    return bowl(theta, batch) + 0 * torch.distributions.Normal(0.0, scale, validate_args=True).log_prob(
        torch.tensor(0.0)
    )


def answering_nan(theta: Tensor, batch: object) -> Tensor:
    return torch.where(theta[:, 0].abs() < 1, bowl(theta, batch), torch.nan)


@pytest.mark.parametrize("raising", [failing_cholesky, failing_constraint])
@pytest.mark.parametrize(
    "method", [HMCConfig(step_size=0.7, num_leapfrog=3), MetropolisConfig(), GPSConfig(max_std=1.0)],
    ids=lambda method: method.name,
)  # fmt: skip
def test_an_energy_that_raises_rejects_one_chain_as_nan_does(
    raising: Callable[..., Tensor], method: MethodConfig
) -> None:
    options: dict[str, Any] = {"theta": 0.1 * torch.ones(5, 3), "method": method, "num_steps": 60, "burn_in": 20}
    with pytest.warns(UserWarning, match=r"the energy raised an exception in \d+ of 300 moves, which were rejected"):
        found = run(raising, **options)
    expected = run(answering_nan, **options)
    assert torch.equal(found.draws, expected.draws)
    raised = found.info["energy_raised"]
    assert torch.equal(raised, found.info["divergent"])
    assert 0 < raised.mean() < 0.9
    assert not expected.info["energy_raised"].any()


def test_an_energy_that_raises_where_chains_start_is_an_error() -> None:
    theta = torch.tensor([[0.5], [3.0], [-0.5], [2.0]])
    with pytest.raises(FloatingPointError, match=r"energy raised _?LinAlgError .* at the start of chains \[1, 3\]"):
        run(failing_cholesky, theta=theta, method=HMCConfig())
    with pytest.raises(torch.linalg.LinAlgError):  # a rule moves on from every theta, and can reject none
        run(failing_cholesky, theta=theta)


@pytest.mark.parametrize("error", [TypeError, NameError, RuntimeError, ValueError, KeyError, torch.OutOfMemoryError])
def test_errors_of_the_program_end_the_run(error: type[Exception]) -> None:
    calls = itertools.count()

    def energy(theta: Tensor, batch: object) -> Tensor:
        if next(calls) > 20:
            raise error("a mistake")
        return bowl(theta, batch)

    with pytest.raises(error, match="a mistake"):
        run(energy, method=HMCConfig())


@pytest.mark.parametrize("method", [SGLDConfig(), SGHMCConfig(), MAPConfig(), MeanFieldConfig(num_draws=1)])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_non_finite_energy_stops_and_names_update_and_chain(method: MethodConfig, bad: float) -> None:
    calls = itertools.count()

    def energy(theta: Tensor, batch: object) -> Tensor:
        poison = torch.tensor([0.0, bad, 0.0]) if next(calls) == 5 else torch.zeros(3)
        return bowl(theta, batch) + poison

    with pytest.raises(FloatingPointError, match=r"non-finite energy at update 6 \(chain 1\)"):
        run(energy, theta=torch.ones(3, 2), method=method, burn_in=8)  # no other evaluation before the first draw


def test_a_non_finite_gradient_of_a_finite_energy_stops_the_run() -> None:
    def energy(theta: Tensor, batch: object) -> Tensor:
        return theta.abs().sqrt().sum(1)  # infinite slope at 0

    theta = torch.tensor([[1.0, 1.0], [0.0, 1.0], [1.0, 0.0]])
    with pytest.raises(FloatingPointError, match=r"non-finite gradient of the energy at update 1 \(chains 1, 2\)"):
        run(energy, theta=theta)


def test_huge_but_finite_energies_go_on() -> None:
    def energy(theta: Tensor, batch: object) -> Tensor:
        return 3e38 + 0 * theta.sum(1)  # the sum over two chains overflows float32

    assert run(energy).draws.isfinite().all()


@pytest.mark.parametrize("method", [MetropolisConfig(), HMCConfig()])
def test_kernels_start_inside_the_support_and_never_leave_it(method: MethodConfig) -> None:
    def half_normal(theta: Tensor, batch: object) -> Tensor:
        return torch.where((theta > 0).all(1), bowl(theta, batch), torch.inf)

    draws = run(half_normal, method=method, num_steps=200).draws
    assert (draws > 0).all()
    with pytest.raises(FloatingPointError, match=r"non-finite energy at update 1 \(chain 0\)"):
        run(half_normal, method=method, theta=torch.tensor([[-1.0], [1.0]]))


@pytest.mark.parametrize("score", ["heldout", "heldout_by_row"])
def test_an_energy_has_no_held_out_rows(score: str) -> None:
    objective = EnergyObjective(bowl, batched=False, requirements=MAPConfig().requirements)
    with pytest.raises(TypeError, match="an energy has no held-out rows: the method needs a model and its data"):
        getattr(objective, score)(torch.zeros(2, 3), "all", num_members=4)


def test_the_gradient_of_all_batches_is_their_mean() -> None:
    batches = [torch.tensor(1.0), torch.tensor(4.0)]
    objective = EnergyObjective(
        lambda theta, batch: batch * theta.square().sum(1) / 2,
        batched=True,
        requirements=MAPConfig().requirements,
        all_batches=lambda: batches,
    )
    theta = torch.tensor([[1.0, -2.0], [0.5, 3.0]])
    torch.testing.assert_close(objective.full_gradient(theta), -2.5 * theta)
    assert not torch.allclose(objective.full_gradient(theta), objective.evaluate(theta, batches[:1]).grad_log_lik)
