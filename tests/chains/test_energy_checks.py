from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hf_bayes.chains.energy_checks import check_energy
from hf_bayes.core.config import MethodConfig
from hf_bayes.core.rng import generator
from hf_bayes.methods.averaging.map import MAPConfig
from hf_bayes.methods.mcmc.hmc import HMCConfig
from hf_bayes.methods.mcmc.metropolis import MetropolisConfig
from hf_bayes.methods.sgmcmc.sgld import SGLDConfig
from tests.chains.bowl import bowl, run


def coupled(theta: Tensor, batch: object) -> Tensor:
    """The sum over chains, returned to each."""
    return 0.5 * theta.square().sum().expand(len(theta))


def follower(theta: Tensor, batch: object) -> Tensor:
    """Chain 0 alone depends on another chain."""
    return bowl(theta, batch) + torch.eye(len(theta))[0].to(theta) * theta[1].sum()


@pytest.mark.parametrize("energy", [coupled, follower])
@pytest.mark.parametrize("method", [HMCConfig(), MetropolisConfig(), SGLDConfig()], ids=lambda method: method.name)
@pytest.mark.parametrize("start", [torch.zeros(2, 3), torch.randn(5, 3, generator=generator("start"))])
def test_chains_that_depend_on_each_other_are_refused(
    energy: Callable[..., Tensor], method: MethodConfig, start: Tensor
) -> None:
    run(theta=start, method=method, num_steps=40, burn_in=20)
    with pytest.raises(ValueError, match=r"treat chains independently, .* for chain \d when only other chains move"):
        run(energy, theta=start, method=method, num_steps=40, burn_in=20)


def own_minibatches(theta: Tensor, batch: object) -> Tensor:
    """10 of 100 rows, drawn anew in each call."""
    rows = torch.arange(100.0)[torch.randint(100, (10,))] / 100
    return 10 * (theta[:, :1] - rows).square().sum(1)


def dropout(theta: Tensor, batch: object) -> Tensor:
    return bowl(torch.nn.functional.dropout(theta, 0.5), batch)


def random_factor(theta: Tensor, batch: object) -> Tensor:
    """Nothing is random where chains may start, at 0."""
    return theta.square().sum(1) * torch.rand(1)


@pytest.mark.parametrize("num_chains", [1, 3])
def test_a_random_factor_is_refused_though_chains_start_at_zero(num_chains: int) -> None:
    with pytest.raises(ValueError, match="same value in every call"):
        run(random_factor, theta=torch.zeros(num_chains, 2), method=HMCConfig(), num_steps=50)


def sometimes_nan(theta: Tensor, batch: object) -> Tensor:
    return bowl(theta, batch) + torch.where(torch.rand(len(theta)) < 0.5, torch.nan, 0.0)


@pytest.mark.parametrize("energy", [own_minibatches, dropout])
@pytest.mark.parametrize("start", [torch.ones(1, 3), torch.ones(4, 3), torch.randn(8, 3, generator=generator("start"))])
def test_only_exact_methods_refuse_a_random_energy(energy: Callable[..., Tensor], start: Tensor) -> None:
    for exact in (HMCConfig(), MetropolisConfig()):
        with pytest.raises(ValueError, match=r"same value in every call .* or use a stochastic-gradient method"):
            run(energy, theta=start, method=exact, num_steps=20)
    for noisy in (SGLDConfig(), MAPConfig()):
        run(energy, theta=start, method=noisy, num_steps=20, learning_rate=1e-3)


def test_an_energy_that_is_at_times_nan_is_random() -> None:
    with pytest.raises(ValueError, match="got one that changes by nan nats for chain"):
        check_energy(lambda theta: sometimes_nan(theta, None), torch.zeros(64, 2), exact=True, number=0)
    fixed = torch.tensor([torch.nan, torch.inf, 1.0])
    check_energy(lambda theta: fixed, torch.zeros(3, 2), exact=True, number=0)


def test_rounding_between_calls_is_not_random() -> None:
    rng = generator("noise")

    def noisy(theta: Tensor, batch: object) -> Tensor:
        return bowl(theta, batch) + 1e-4 * torch.randn(len(theta), generator=rng)

    run(noisy, theta=torch.randn(8, 3, generator=generator("start")), method=HMCConfig(), num_steps=20)


def sums_in_another_order(theta: Tensor, batch: object) -> Tensor:
    """float32's rounding of 10,000 terms near 1e7 depends on who is the largest."""
    terms = 1e3 * (1 + 1e-3 * theta[:, :1] * torch.linspace(-1, 1, 10_000)).square()
    order = torch.randperm(10_000, generator=torch.Generator().manual_seed(int(theta.abs().sum() * 1e6)))
    return terms[:, order].cumsum(1)[:, -1]


def test_rounding_that_depends_on_other_chains_is_no_coupling() -> None:
    theta = torch.randn(6, 1, generator=generator("start"))
    sums_in_another_order(theta, None)
    run(sums_in_another_order, theta=theta, num_steps=3, learning_rate=1e-9)
