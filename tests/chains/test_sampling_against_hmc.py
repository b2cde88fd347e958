"""The posterior of a logistic regression by ``sample``, against long Hamiltonian Monte Carlo."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hf_bayes.chains.sampling import sample
from hf_bayes.core.config import MethodConfig
from hf_bayes.core.rng import generator
from hf_bayes.methods.mcmc.hmc import HMCConfig
from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from hf_bayes.methods.sgmcmc.sgld import SGLDConfig

INPUTS = torch.randn(200, 3, generator=generator("inputs"))


LABELS = (torch.rand(200, generator=generator("labels")) < (INPUTS @ torch.tensor([1.0, -2.0, 0.5])).sigmoid()).float()


def logistic(labels: Tensor) -> Callable[[Tensor, object], Tensor]:
    """The energy of 200 rows and 3 weights under the prior N(0, 1)."""

    def energy(theta: Tensor, batch: object) -> Tensor:
        logits = theta @ INPUTS.T
        log_lik = (labels * logits - torch.nn.functional.softplus(logits)).sum(1)
        return -log_lik + 0.5 * theta.square().sum(1)

    return energy


@pytest.fixture(scope="module")
def reference() -> Tensor:
    """[3, 2]: posterior mean and standard deviation by long HMC."""
    run_length = {"num_steps": 1000, "burn_in": 200}
    draws = sample(logistic(LABELS), torch.zeros(64, 3), HMCConfig(), learning_rate=0.1, seed=1, **run_length).draws
    return torch.stack([draws.mean((0, 1)), draws.flatten(0, 1).std(0)], 1)


def errors(config: MethodConfig, reference: Tensor, labels: Tensor = LABELS) -> tuple[float, float]:
    """The largest error of a mean in standard deviations, and of a standard deviation relative to itself."""
    draws = sample(
        logistic(labels),
        torch.zeros(256, 3),
        config,
        num_steps=2500,
        learning_rate=0.1,
        num_data=200,
        burn_in=500,
        thin=5,
    ).draws.flatten(0, 1)
    mean, std = reference.unbind(1)
    return ((draws.mean(0) - mean) / std).abs().max().item(), (draws.std(0) / std - 1).abs().max().item()


# l * lambda_max is 0.02: a bias of 0.3 % of a standard deviation. SGLD forgets the flattest direction in 150 updates:
# at ESS 1750, 4 standard errors of a mean are 0.096 standard deviations, of a standard deviation 6.8 % of it.
MEAN_TOLERANCE, STD_TOLERANCE = 0.096, 0.068


@pytest.mark.parametrize("config", [SGHMCConfig(), SGLDConfig()], ids=["sghmc", "sgld"])
@pytest.mark.statistics
def test_posterior_of_a_logistic_regression_agrees_with_long_hmc(config: MethodConfig, reference: Tensor) -> None:
    mean_error, std_error = errors(config, reference)
    assert mean_error < MEAN_TOLERANCE
    assert std_error < STD_TOLERANCE


@pytest.mark.statistics
def test_the_hmc_comparison_catches_wrong_temperature_and_data(reference: Tensor) -> None:
    assert errors(SGHMCConfig(temperature=0.8), reference)[1] > STD_TOLERANCE
    spoilt = torch.cat([torch.zeros(20), LABELS[20:]])
    assert errors(SGHMCConfig(), reference, spoilt)[0] > MEAN_TOLERANCE
