"""The conformance table: one row per method, and what the tests that every method passes share."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_bayes.chains.sampling import SampleResult, sample
from hf_bayes.core.config import MethodConfig
from hf_bayes.core.rng import generator
from hf_bayes.core.types import Problem
from hf_bayes.distributions.energy import FlatPrior
from hf_bayes.methods.averaging.ensemble import EnsembleConfig
from hf_bayes.methods.averaging.map import MAPConfig
from hf_bayes.methods.averaging.mc_dropout import MCDropoutConfig
from hf_bayes.methods.averaging.sgd_mc import SGDMCConfig
from hf_bayes.methods.averaging.snapshot import SnapshotConfig
from hf_bayes.methods.averaging.swa import SWAConfig
from hf_bayes.methods.averaging.swag import SWAGConfig
from hf_bayes.methods.laplace.laplace import LaplaceConfig
from hf_bayes.methods.mcmc.gps import GPSConfig
from hf_bayes.methods.mcmc.hmc import HMCConfig
from hf_bayes.methods.mcmc.metropolis import MetropolisConfig
from hf_bayes.methods.mcmc.penalty import PenaltyConfig
from hf_bayes.methods.sgmcmc.agps import AGPSConfig
from hf_bayes.methods.sgmcmc.baoab import BAOABConfig
from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from hf_bayes.methods.sgmcmc.sghmc_euler import SGHMCEulerConfig
from hf_bayes.methods.sgmcmc.sgld import SGLDConfig
from hf_bayes.methods.sgmcmc.sgnht import SGNHTConfig
from hf_bayes.methods.variational.blob import BLoBConfig
from hf_bayes.methods.variational.ekf import EKFConfig
from hf_bayes.methods.variational.full_rank_vi import FullRankVIConfig
from hf_bayes.methods.variational.ivon import IVONConfig
from hf_bayes.methods.variational.low_rank_vi import LowRankVIConfig
from hf_bayes.methods.variational.mean_field import MeanFieldConfig
from hf_bayes.methods.variational.training_free import TrainingFreeConfig

N = 10
MEAN = 0.5  # of the Gaussian target U = N |theta - MEAN|^2 / 2


@dataclass(frozen=True, kw_only=True)
class Row:
    """The facts about a method that the table's tests need.

    Attributes:
        config: an instance with its own fields away from their defaults.
        learning_rate: a learning rate that suits the Gaussian target.
        law: temperature -> stationary variance on the Gaussian target (of the discretisation); None for optimisers.
        shape: [M, d] of the Gaussian run, with M d >= 256 independent coordinates.
        num_steps: number of updates of the Gaussian run; a fifth of them is burn-in.
        noise: the method draws random numbers.
        cold: the method has a limit T = 0, where it finds the mode; if not, it refuses T = 0, unless it is an optimiser
            of another function than U.
        batches: number of batches per update, for methods that need them; each is the whole data here.
        convex: the run needs a minimum where it ends, so its energy is the Gaussian's.
    """

    config: MethodConfig
    learning_rate: float
    law: Callable[[float], float] | None
    shape: tuple[int, int] = (4, 64)
    num_steps: int = 1500
    noise: bool = True
    cold: bool = False
    batches: int = 0
    convex: bool = False

    @property
    def data(self) -> dict[str, Any]:
        """Return the arguments of ``sample``."""
        return {"batches": [None], "batches_per_step": self.batches} if self.batches else {}


def exact(temperature: float) -> float:
    return temperature / N


def sghmc_law(temperature: float) -> float:
    return exact(temperature) / (1 - 0.1 / (2 * (1 + 0.8)))


def sgld_law(temperature: float) -> float:
    return exact(temperature) / (1 - 0.1 / 2)


def sgnht_law(temperature: float) -> float:
    return exact(temperature) * (1 - (1.95 - math.sqrt(1.95**2 - 4 * 0.4)) / 4)


def sghmc_euler_law(temperature: float) -> float:
    return exact(temperature) * 0.2 * (1.8 + 0.1) / ((0.2 - 0.1) * (1.8 + 0.05))


ROWS = {
    "sghmc": Row(config=SGHMCConfig(momentum=0.8), learning_rate=0.1, law=sghmc_law, cold=True),
    "sgld": Row(config=SGLDConfig(), learning_rate=0.1, law=sgld_law, cold=True),
    "baoab": Row(config=BAOABConfig(momentum=0.8, scheme="baoa"), learning_rate=0.1, law=exact, cold=True),
    "sgnht": Row(config=SGNHTConfig(momentum=0.8, thermostat_steps=6.0), learning_rate=0.1, law=sgnht_law),
    "sghmc_euler": Row(config=SGHMCEulerConfig(momentum=0.8), learning_rate=0.1, law=sghmc_euler_law, cold=True),
    "map": Row(config=MAPConfig(momentum=0.8), learning_rate=0.01, law=None, noise=False, cold=True),
    "ensemble": Row(config=EnsembleConfig(num_chains=5), learning_rate=0.01, law=None, noise=False, cold=True),
    "mean_field": Row(config=MeanFieldConfig(init_std=0.05), learning_rate=0.01, law=exact),
    "ivon": Row(config=IVONConfig(init_std=0.05, momentum=0.8), learning_rate=0.05, law=exact),
    "low_rank_vi": Row(config=LowRankVIConfig(init_std=0.05, rank=3), learning_rate=0.01, law=exact),
    "full_rank_vi": Row(config=FullRankVIConfig(init_std=0.05), learning_rate=0.01, law=exact),
    "ekf": Row(config=EKFConfig(structure="full", init_std=0.5), learning_rate=0.5, law=None, noise=False),
    "metropolis": Row(
        config=MetropolisConfig(target_acceptance=0.3), learning_rate=0.3, law=exact, shape=(128, 2), num_steps=1000
    ),
    "hmc": Row(config=HMCConfig(num_leapfrog=4), learning_rate=0.1, law=exact, shape=(8, 32), num_steps=300),
    "laplace": Row(
        config=LaplaceConfig(structure="full", num_samples=2), learning_rate=0.01, law=None, noise=False, convex=True
    ),
    "penalty": Row(
        config=PenaltyConfig(num_leapfrog=3, proposal_batches=2, target_acceptance=0.7),
        learning_rate=0.1,
        law=exact,
        shape=(16, 16),
        num_steps=300,
        batches=4,
    ),
    "agps": Row(config=AGPSConfig(max_std=0.8), learning_rate=0.1, law=exact, num_steps=6000),
    "gps": Row(config=GPSConfig(max_std=1.0), learning_rate=0.1, law=exact, shape=(128, 2), num_steps=600),
    "sgd_mc": Row(config=SGDMCConfig(momentum=0.5), learning_rate=0.1, law=None, noise=False, cold=True),
    "snapshot": Row(
        config=SnapshotConfig(momentum=0.8, schedule=None), learning_rate=0.1, law=None, noise=False, cold=True
    ),
    "swa": Row(config=SWAConfig(momentum=0.0, optimizer="sgd"), learning_rate=0.5, law=None, noise=False, cold=True),
    "swag": Row(
        config=SWAGConfig(momentum=0.0, rank=3, optimizer="sgd"), learning_rate=0.5, law=None, noise=False, cold=True
    ),
    "mc_dropout": Row(config=MCDropoutConfig(dropout=0.3, num_masks=2), learning_rate=0.01, law=None),
    "training_free": Row(
        config=TrainingFreeConfig(scales="layer", tolerance=2.0), learning_rate=0.01, law=None, noise=False, cold=True
    ),
    "blob": Row(config=BLoBConfig(init_std=0.05), learning_rate=0.01, law=exact),  # without names nothing is a point
}

rows = pytest.mark.parametrize("row", ROWS.values(), ids=ROWS.keys())
noisy = pytest.mark.parametrize(
    "row", [r for r in ROWS.values() if r.noise], ids=[k for k, r in ROWS.items() if r.noise]
)
sampled = pytest.mark.parametrize("row", [r for r in ROWS.values() if r.law], ids=[k for k, r in ROWS.items() if r.law])
# ``sample`` has no held-out rows
ON_ENERGIES = {name: row for name, row in ROWS.items() if row.config.requirements.heldout == "none"}
on_energies = pytest.mark.parametrize("row", ON_ENERGIES.values(), ids=ON_ENERGIES.keys())
cold = pytest.mark.parametrize(
    "row", [r for r in ON_ENERGIES.values() if r.cold], ids=[k for k, r in ON_ENERGIES.items() if r.cold]
)


def gaussian(theta: Tensor, batch: object) -> Tensor:
    return 0.5 * N * (theta - MEAN).square().sum(1)


def rough(theta: Tensor, batch: object) -> Tensor:
    """Return an ordinary energy with coupled coordinates and several minima."""
    return N * (0.5 * theta.square() + (2 * theta).cos() + 0.1 * theta * theta.roll(1, 1)).sum(1)


def starts(num_chains: int, dim: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.randn(num_chains, dim, generator=generator("starts"), dtype=dtype).to(device)


def run(row: Row, theta: Tensor, *, num_steps: int = 12, seed: int = 0, **changes: Any) -> SampleResult:
    config = dataclasses.replace(row.config, **changes)
    return sample(
        gaussian if row.convex else rough,
        theta,
        config,
        num_steps=num_steps,
        learning_rate=row.learning_rate,
        num_data=N,
        burn_in=4,
        seed=seed,
        **row.data,
    )


def problem(**changes: Any) -> Problem:
    return Problem(N, FlatPrior(), learning_rate=0.1, num_steps=10, burn_in=5, shapes={"": (5,)})._replace(**changes)
