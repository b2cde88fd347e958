"""The mean of N rows from minibatches of n, all chains at once: U(theta) = sum_i (y_i - theta)^2 / 2."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hf_bayes.core.rng import generator
from hf_bayes.core.types import Evaluation, Problem
from hf_bayes.distributions.energy import FlatPrior
from hf_bayes.methods.mcmc.penalty import PenaltyConfig

N = 1000
SD = N**-0.5
"""The standard deviation of the posterior N(0, 1 / N): the rows have mean 0 and variance 1."""

Draw = Callable[[int, int, torch.Generator], Tensor]
"""(M, K, generator) -> [M, K]: the mean of the rows of each batch."""


def independent(n: int) -> Draw:
    """Batches of n Gaussian rows, independent of each other."""
    return lambda m, k, rng: torch.randn(m, k, dtype=torch.float64, generator=rng) / n**0.5


def disjoint(n: int) -> Draw:
    """Return the means of K batches of n rows without repetition, from N Gaussian rows with mean 0."""

    def draw(m: int, k: int, rng: torch.Generator) -> Tensor:
        means = independent(n)(m, k, rng)
        rest = torch.randn(m, dtype=torch.float64, generator=rng) * max(0, N - k * n) ** 0.5
        return means - ((n * means.sum(1) + rest) / N)[:, None]

    return draw


class Batches:
    """The log-likelihood of K batches, drawn anew by ``renew`` for each chain."""

    def __init__(self, draw: Draw, count: int, num_chains: int) -> None:
        self.draw, self.count, self.num_chains = draw, count, num_chains
        self.rng = generator("batches")
        self.asked: list[Tensor] = []
        self.renew()

    def renew(self) -> None:
        self.means, self.asked = self.draw(self.num_chains, self.count, self.rng), []

    def __call__(self, theta: Tensor, *, gradient: bool = True, batches: slice | None = None) -> Evaluation:
        self.asked.append(theta)
        means = self.means[:, batches or slice(None)]
        columns = N * (means * theta - theta.square() / 2)
        grad = N * (means.mean(1, keepdim=True) - theta)
        return Evaluation(columns.mean(1), grad if gradient else None, batch_log_lik=columns)


def variance_ratio(
    config: PenaltyConfig, batches: Batches, *, num_steps: int = 600, fraction: float | None = None
) -> tuple[float, float, dict[str, float]]:
    """Variance of theta over that of the posterior, its standard error, and the mean of each info.

    Chains start in equilibrium; a sixth of the run is burn-in.
    """
    rng, burn_in = generator("moves"), num_steps // 6
    kernel = config.build(Problem(N, FlatPrior(), SD, num_steps, burn_in, {"": (1,)}, batch_fraction=fraction))
    theta = SD * torch.randn(batches.num_chains, 1, dtype=torch.float64, generator=rng)
    state = kernel.init(theta, batches, [rng])
    squares, infos = torch.zeros(batches.num_chains, dtype=torch.float64), []
    for step in range(num_steps):
        batches.renew()
        state, info = kernel.step(state, batches, [rng])
        if step >= burn_in:
            squares += state.theta[:, 0].square() / (num_steps - burn_in)
            infos.append(info)
    kernel.finish(state, state.theta[:, None])
    ratios = squares / SD**2
    means = {name: float(torch.stack([info[name] for info in infos]).mean()) for name in infos[0]}
    return float(ratios.mean()), float(ratios.std()) / len(ratios) ** 0.5, means
