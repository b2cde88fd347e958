from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_bayes.chains.sampling import sample
from hf_bayes.core.config import MethodConfig
from hf_bayes.core.rng import generator
from hf_bayes.core.types import Evaluation, Problem, Rule
from hf_bayes.distributions.approximations import Draws
from hf_bayes.distributions.energy import FlatPrior
from hf_bayes.methods.assembly import assemble
from hf_bayes.methods.averaging.sgd_mc import SGDMCConfig
from hf_bayes.methods.averaging.snapshot import SnapshotConfig
from hf_bayes.methods.averaging.swa import SWAConfig
from hf_bayes.methods.averaging.swag import SWAGConfig
from tests import runs
from tests.methods.averaging.regression import BATCHES, RATE, START, N, energy, torch_sgd
from tests.methods.sgmcmc.laws import lyapunov
from tests.tiny_models import tiny_llama, with_lora


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_draws_are_the_iterates_of_torch_sgd(momentum: float) -> None:
    config = SGDMCConfig(momentum=momentum)
    draws = sample(
        energy, START, config, num_steps=40, learning_rate=RATE, num_data=N, batches=BATCHES, burn_in=10, thin=6
    ).draws
    path = torch_sgd(40, momentum=momentum)
    assert (draws - path[15::6].transpose(0, 1)).abs().max() < 1e-12
    assert (draws - path[14:39:6].transpose(0, 1)).abs().max() > 1e-3  # an update late


HESSIAN = torch.tensor([[1.5, 0.4, 0.0], [0.4, 1.0, -0.3], [0.0, -0.3, 0.6]], dtype=torch.float64)
POINTS = torch.randn(50, 3, generator=generator("points"), dtype=torch.float64)
POINTS -= POINTS.mean(0)
BATCH_SIZE, STEP = 4, 0.3
NOISE = HESSIAN @ (POINTS.T @ POINTS / len(POINTS)) @ HESSIAN / BATCH_SIZE
"""The covariance of the gradient of the mean loss (theta - x)' H (theta - x) / 2 for points drawn with replacement."""


def stationary(momentum: float, step: float) -> Tensor:
    """Return the covariance [3, 3] of theta, from the linear map of (theta, v) in one update."""
    eye = torch.eye(3, dtype=torch.float64)
    matrix = torch.cat(
        [torch.cat([eye - step * HESSIAN, -step * momentum * eye], 1), torch.cat([HESSIAN, momentum * eye], 1)]
    )
    kick = torch.cat([-step * eye, eye])
    return lyapunov(matrix, kick @ NOISE @ kick.T)[:3, :3]


def deviation(draws: Tensor, law: Tensor) -> float:
    """Return the largest error of the covariance of independent, nearly Gaussian draws [S, d], in standard errors."""
    variance = torch.outer(law.diagonal(), law.diagonal()) + law**2
    return float(((draws.T @ draws / len(draws) - law).abs() / (variance / len(draws)).sqrt()).max())


@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.statistics
def test_covariance_solves_the_discrete_lyapunov_equation(momentum: float) -> None:
    num_chains, picks = 10_000, generator("picks")

    def chains_own_batches(theta: Tensor, batch: Any) -> Tensor:
        rows = torch.randint(len(POINTS), (num_chains, BATCH_SIZE), generator=picks)
        apart = theta[:, None] - POINTS[rows]
        return 7 * 0.5 * ((apart @ HESSIAN) * apart).sum(2).mean(1)

    start = torch.zeros(num_chains, 3, dtype=torch.float64)
    config = SGDMCConfig(momentum=momentum)
    # the slowest mode decays by 1 - 0.3 * 0.4 an update: by 5e-4 from one draw to the next
    draws = sample(
        chains_own_batches, start, config, num_steps=300, learning_rate=STEP, num_data=7, thin=60, progress=False
    ).draws.flatten(0, 1)
    law = stationary(momentum, STEP)
    assert deviation(draws, law) < 4.5  # standard errors, the largest of 9
    assert (draws.square().mean(0) / law.diagonal() - 1).abs().max() < 0.03  # 4.5 of them: sqrt(2 / 50 000) each
    assert deviation(draws, stationary(momentum, 1.1 * STEP)) > 4.5  # the broken twin: a step 10 % off


def test_to_first_order_that_is_the_continuous_lyapunov_equation() -> None:
    covariance = stationary(0.0, 1e-5)
    residual = HESSIAN @ covariance + covariance @ HESSIAN - 1e-5 * NOISE
    assert residual.abs().max() < 1e-4 * 1e-5  # of relative order l


def test_noise_temperature_is_one_at_the_optimal_rate() -> None:
    problem = Problem(10, FlatPrior(), 0.2, num_steps=4, burn_in=0, shapes={"a": (1,), "b": (3,)})
    config = SGDMCConfig(momentum=0.75, measure_gradient_noise=True)
    rule = assemble(config, problem)
    assert isinstance(rule, Rule)
    state = rule.init(torch.zeros(2, 4), [generator(0), generator(1)])
    variance = torch.tensor([[40.0, 20.0], [10.0, 10.0]])  # mean over elements 25 and 10
    _, info = rule.update(state, Evaluation(torch.zeros(2), torch.ones(2, 4), variance), 0.2, [])
    assert info["noise_temperature"].tolist() == pytest.approx([1.0, 0.4])  # l V / (2 N (1 - beta)) = V / 25
    with pytest.raises(ValueError, match=r"sgd_mc: temperature must be 0, got 1\.0: SGD adds no noise"):
        SGDMCConfig(temperature=1.0)


@pytest.mark.parametrize(
    "method",
    [
        SGDMCConfig(draws_per_chain=3),
        SnapshotConfig(draws_per_chain=3),
        SWAConfig(optimizer="sgd"),
        SWAGConfig(optimizer="sgd", rank=2),
    ],
    ids=lambda method: method.name,
)
@pytest.mark.models
def test_a_run_on_a_finished_adapter_starts_at_its_weights(method: MethodConfig, tmp_path: Path) -> None:
    still = runs.trainer(tmp_path / "still", method, model=with_lora(tiny_llama()), learning_rate=1e-30)
    start = still.bayesian.theta.detach().clone()
    still.train()
    assert torch.allclose(still.posterior.approximation.mean[None], start, rtol=1e-6)  # a mean of equal numbers rounds
    moved = runs.trainer(tmp_path / "moved", method, model=with_lora(tiny_llama()))
    moved.train()
    moved.save_model()
    approximation = type(moved.posterior).from_pretrained(tmp_path / "moved").approximation
    assert not torch.allclose(approximation.mean[None], start, rtol=1e-3)
    assert isinstance(approximation, Draws) == (method.name != "swag")
    members = approximation.sample(1, generator(0))
    assert members.isfinite().all()
