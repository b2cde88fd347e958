"""A prior that ``sample`` takes apart from the energy."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_bayes.chains.sampling import sample
from hf_bayes.core.config import MethodConfig
from hf_bayes.distributions.approximations import Gaussian
from hf_bayes.distributions.energy import GaussianPrior
from hf_bayes.methods.averaging.map import MAPConfig
from hf_bayes.methods.mcmc.hmc import HMCConfig
from tests.chains.bowl import run


def likelihood(theta: Tensor, batch: object) -> Tensor:
    return 2 * (theta - 1).square().sum(1)  # precision 4 around 1


def moments(method: MethodConfig) -> tuple[float, float]:
    """Return mean and variance of the draws under the likelihood above and the prior N(0, 1/4)."""
    starts = torch.zeros(1024, 2)
    draws = sample(likelihood, starts, method, num_steps=40, burn_in=30, thin=5, learning_rate=0.1, prior=0.5).draws
    return float(draws.mean()), float(draws.var())


@pytest.mark.statistics
def test_a_likelihood_alone_is_tempered_where_the_prior_is_apart() -> None:
    mean, variance = moments(HMCConfig(temperature=0.5, temper="likelihood"))
    # precision 4 / T + 4 = 12, mean 8 / 12; 4 standard errors of 2048 chain elements: .026, and 13 %
    assert mean == pytest.approx(2 / 3, abs=0.026)
    assert variance == pytest.approx(1 / 12, rel=0.13)
    whole_mean, whole_variance = moments(HMCConfig(temperature=0.5))  # the broken twin: the prior is tempered, too
    assert whole_mean == pytest.approx(1 / 2, abs=0.026)
    assert whole_variance == pytest.approx(0.5 / 8, rel=0.13)


def test_a_prior_apart_is_the_prior_inside() -> None:
    def inside(theta: Tensor, batch: object) -> Tensor:
        return likelihood(theta, batch) + 0.5 * (theta / 0.5).square().sum(1)

    theta = torch.zeros(2, 3, dtype=torch.float64)
    expected = run(inside, theta=theta).draws
    for prior in (
        0.5,
        GaussianPrior(torch.tensor(0.0), torch.tensor(0.5)),
        Gaussian.diagonal(theta[:1], theta[:1] + 0.5),
    ):
        assert torch.allclose(run(likelihood, theta=theta, prior=prior).draws, expected, atol=1e-12)


def test_each_named_tensor_may_have_a_prior_of_its_own() -> None:
    def energy(theta: dict[str, Tensor], batch: object) -> Tensor:
        return 0 * (theta["a"].sum(1) + theta["b"])

    method = MAPConfig()
    theta = {"a": torch.ones(1, 2), "b": torch.ones(1)}
    info = run(energy, theta=theta, method=method, num_steps=1, prior={"b": 2.0, "a": 0.5}).info
    log_normaliser = 3 * 0.5 * math.log(2 * math.pi) + 2 * math.log(0.5) + math.log(2.0)
    assert float(info["energy"][0, 0]) == pytest.approx(2 * 0.5 * 4 + 0.5 / 4 + log_normaliser)


class Elementwise(GaussianPrior):
    """A density of each element, not of theta."""

    def __init__(self) -> None:
        super().__init__(torch.zeros(()), torch.ones(()))

    def log_prob(self, theta: Tensor) -> Tensor:
        return -theta.square() / 2

    def to(self, like: Tensor) -> Elementwise:
        return self


@pytest.mark.parametrize(
    ("prior", "message"),
    [
        (0.0, "prior must be a density .* or a standard deviation > 0 .*; got 0.0"),
        ("wide", "got 'wide'"),
        ({"a": 1.0}, r"prior must name each tensor of theta once, got \['a'\]: theta is one tensor without names"),
        (Gaussian.diagonal(*torch.ones(2, 1, 2)), r"log_prob \[M, 3\] .* over 2 elements has no density of 3 elements"),
        (Gaussian.diagonal(*torch.ones(2, 1, 1)), "over 1 elements has no density of 3 elements"),
        (GaussianPrior(torch.zeros(2), torch.ones(2)), "failed at the start of a chain: The size of tensor"),
        (Elementwise(), r"log_prob \[M, 3\] -> \[M\], got \[1, 3\] for one row: sum over"),
    ],
)
def test_what_is_no_prior_is_refused(prior: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(prior=prior)
