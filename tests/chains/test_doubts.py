from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_bayes.chains.sampling import sample
from hf_bayes.core.config import MethodConfig
from hf_bayes.methods.mcmc.gps import GPSConfig
from hf_bayes.methods.mcmc.hmc import HMCConfig
from hf_bayes.methods.mcmc.metropolis import MetropolisConfig
from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from tests.chains.bowl import bowl, run


@pytest.mark.parametrize(
    "method",
    [
        MetropolisConfig(target_acceptance=None),
        HMCConfig(target_acceptance=None, step_size=1e3),
        GPSConfig(max_std=1e-3),
    ],
    ids=lambda method: method.name,
)
@pytest.mark.statistics
def test_chains_that_accept_nothing_are_warned_of(method: MethodConfig) -> None:
    def energy(theta: Tensor, batch: object) -> Tensor:  # the second chain is free to move
        return bowl(theta, batch) * torch.tensor([1e12, 0.0])

    with pytest.warns(UserWarning, match=rf"{method.name}: 1 of 2 chains \(the first is 0\) accept nothing after burn"):
        run(energy, method=method, learning_rate=1.0, burn_in=4)


def test_exceptions_in_the_search_for_a_step_are_no_moves() -> None:
    def energy(theta: Tensor, batch: None) -> Tensor:
        if bool((theta.abs() > 100).any()):
            raise OverflowError("too far")
        return bowl(theta, batch)

    words = (
        r"hmc: the energy raised an exception in the search for a first step size, .* in none of 80 moves\. The first"
    )
    with pytest.warns(UserWarning, match=rf"{words} was OverflowError: too far"):
        run(energy, method=HMCConfig(num_leapfrog=1), learning_rate=1e3, burn_in=20, num_steps=40)


def _wells(theta: Tensor, batch: None) -> Tensor:
    """Normals of unit variance at -9 and 9: no chain gets from one to the other."""
    return -torch.logaddexp(*(-0.5 * (theta - mode).square().sum(1) for mode in (-9, 9)))


@pytest.mark.statistics
def test_exact_chains_that_disagree_are_warned_of() -> None:
    def draws_from(sides: list[float]) -> None:
        starts = 9 * torch.tensor(sides)[:, None]
        sample(_wells, starts, HMCConfig(), learning_rate=0.1, num_steps=300, burn_in=100)

    with pytest.warns(UserWarning, match=r"hmc: R-hat \d.* of coordinate 0 over 4 chains .* have not converged"):
        draws_from([1.0, 1.0, -1.0, -1.0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        draws_from([1.0, 1.0, 1.0, 1.0])


def _banana(theta: Tensor, batch: None) -> Tensor:
    """A bent law, in whose long ends a chain is slow: the curvature where it began is no scale for them."""
    x, y = theta.unbind(1)
    return x.square() / 2 + 2 * (y - x.square()).square()


@pytest.mark.statistics
def test_chains_that_chose_a_poor_step_size_are_warned_of() -> None:
    def draws_of(energy: Any) -> None:
        sample(
            energy, 0.1 * torch.randn(8, 2, generator=torch.Generator().manual_seed(0)), SGHMCConfig(), num_steps=3000
        )

    with pytest.warns(UserWarning, match=r"sghmc: R-hat \d.* over 8 chains .* have not converged"):
        draws_of(_banana)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        draws_of(bowl)
