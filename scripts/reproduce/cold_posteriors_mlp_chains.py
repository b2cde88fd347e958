"""The networks, the data and the chains of ``cold_posteriors_mlp``.

All data sets, chains and (in HMC) temperatures are rows of one theta: row m uses data set m and, in HMC, U / T_m.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_bayes import HMCConfig, SGHMCConfig, sample
from hf_bayes.core.rng import generator
from hf_bayes.core.schedules import Cyclical
from hf_bayes.distributions.energy import GaussianPrior

INPUTS, UNITS, CLASSES = 5, 10, 3
BIAS_STD = 0.05


@dataclass
class Arguments:
    """The sizes of the run. The results page lists the paper's sizes."""

    depths: int = 3
    temperatures: tuple[float, ...] = (0.001, 0.01, 0.1, 0.3, 1.0)
    num_datasets: int = 4
    num_chains: int = 4
    num_data: int = 100
    num_test: int = 10_000
    hmc_burn_in: int = 400
    hmc_updates: int = 1600
    hmc_thin: int = 8
    num_leapfrog: int = 60
    cycles: int = 160
    burn_in_cycles: int = 10
    cycle_length: int = 200
    learning_rate: float = 0.1
    momentum: float = 0.98
    seed: int = 0


class MLP:
    """An MLP with ``depth`` hidden layers of ReLU units. Its weights are a row of theta [M, d]."""

    def __init__(self, depth: int) -> None:
        widths = [INPUTS, *[UNITS] * depth, CLASSES]
        self.shapes = list(zip(widths[1:], widths[:-1], strict=True))
        self.sizes = [size for out, into in self.shapes for size in (out * into, out)]
        stds = [std for _, into in self.shapes for std in (math.sqrt(2 / into), BIAS_STD)]
        spread_out = torch.tensor(stds).repeat_interleave(torch.tensor(self.sizes))
        self.prior = GaussianPrior(torch.zeros(()), spread_out)
        """He's normal prior on weights and N(0, 0.05^2) on biases (app. N)."""

    def logits(self, theta: Tensor, x: Tensor) -> Tensor:
        """Return logits [M, n, C] of theta [M, d] at x [M or 1, n, 5]."""
        parts = theta.split(self.sizes, 1)
        x = x.expand(len(theta), -1, -1)
        for layer, shape in enumerate(self.shapes):
            x = x.relu() if layer else x
            weight, bias = parts[2 * layer].unflatten(1, shape), parts[2 * layer + 1]
            x = torch.baddbmm(bias[:, None], x, weight.mT)
        return x

    def log_lik(self, theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Return the log-likelihood [M] of x [M, n, 5] and y [M, n]."""
        return -F.cross_entropy(self.logits(theta, x).mT, y, reduction="none").sum(1)

    def start(self, num_rows: int, rng: torch.Generator) -> Tensor:
        """Return draws [M, d] from the prior."""
        return self.prior.sample(num_rows, sum(self.sizes), rng)


@dataclass(frozen=True)
class Data:
    """The D data sets: x [D, n, 5], y [D, n], and as many points again for testing."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor
    truth_nll: list[float]
    """The held-out cross-entropy of the network that made the labels."""


def draw_data(args: Arguments) -> Data:
    """Return data with labels of an MLP of depth 2 drawn from its prior, one MLP for each data set."""
    rng, truth = generator(args.seed, "data"), MLP(2)
    theta = truth.start(args.num_datasets, rng)
    x = torch.randn(args.num_datasets, args.num_data + args.num_test, INPUTS, generator=rng)
    probs = truth.logits(theta, x).softmax(-1)
    y = torch.multinomial(probs.flatten(0, 1), 1, generator=rng).view(x.shape[:2])
    n = args.num_data
    best = [float(F.nll_loss(p.log(), labels)) for p, labels in zip(probs[:, n:], y[:, n:], strict=True)]
    return Data(x[:, :n], y[:, :n], x[:, n:], y[:, n:], best)


def hmc(net: MLP, data: Data, args: Arguments) -> tuple[dict[float, Tensor], dict[float, float]]:
    """Return HMC's {T: draws [D, K, S, d]} and {T: mean acceptance}."""
    shape = (len(args.temperatures), args.num_datasets, args.num_chains)
    temperature = torch.tensor(args.temperatures)[:, None, None].expand(shape).flatten()
    x, y = (v[None, :, None].expand(*shape, *v.shape[1:]).flatten(0, 2) for v in (data.x, data.y))

    def energy(whitened: Tensor, batch: None) -> Tensor:
        theta = whitened * net.prior.std
        return -(net.log_lik(theta, x, y) + net.prior.log_prob(theta)) / temperature

    run = sample(
        energy,
        # in units of the prior's standard deviations: otherwise the scale of the biases limits the steps of the weights
        net.start(math.prod(shape), generator(args.seed, "hmc")) / net.prior.std,
        HMCConfig(num_leapfrog=args.num_leapfrog, step_size=0.001, adapt_mass=False),
        num_steps=args.hmc_burn_in + args.hmc_updates,
        learning_rate=1.0,
        burn_in=args.hmc_burn_in,
        thin=args.hmc_thin,
        seed=args.seed,
    )
    draws, accepted = (
        (run.draws * net.prior.std).unflatten(0, shape),
        run.info["acceptance"][args.hmc_burn_in :].mean(0).view(shape),
    )
    return (
        dict(zip(args.temperatures, draws, strict=True)),
        {t: float(a.mean()) for t, a in zip(args.temperatures, accepted, strict=True)},
    )


def sgmcmc(net: MLP, data: Data, temperature: float, args: Arguments) -> tuple[Tensor, float]:
    """Return draws [D, K, S, d] at the ends of cycles, and the mean configurational temperature there over T."""
    shape = (args.num_datasets, args.num_chains)
    x, y = (v[:, None].expand(*shape, *v.shape[1:]).flatten(0, 1) for v in (data.x, data.y))

    def energy(theta: Tensor, batch: None) -> Tensor:
        return -(net.log_lik(theta, x, y) + net.prior.log_prob(theta))

    run = sample(
        energy,
        net.start(math.prod(shape), generator(args.seed, "sgmcmc")),
        # a batch holds all data: one batch is enough for the preconditioner
        SGHMCConfig(
            temperature=temperature,
            momentum=args.momentum,
            schedule=Cyclical(),
            preconditioner_batches=1,
            preconditioner="layerwise",
        ),
        num_steps=args.cycles * args.cycle_length,
        learning_rate=args.learning_rate,
        num_data=args.num_data,
        burn_in=args.burn_in_cycles * args.cycle_length,
        thin=args.cycle_length,
        seed=args.seed,
    )
    ends = run.info["configurational_temperature"][args.cycle_length - 1 :: args.cycle_length][args.burn_in_cycles :]
    return run.draws.unflatten(0, shape), float(ends.mean()) / temperature
