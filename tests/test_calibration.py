"""Simulation-based calibration (Talts et al. 2018) on conjugate regression: 2000 replicates, a chain each.

Truth and data come from the model; then the truth's rank among draws of the posterior is uniform, whatever the data.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from hf_bayes.core.config import MethodConfig
from hf_bayes.core.rng import generator
from hf_bayes.core.types import Evaluation, Kernel, Problem, Rule
from hf_bayes.distributions.energy import GaussianPrior
from hf_bayes.methods.mcmc import gps, hmc, metropolis, penalty
from hf_bayes.methods.mcmc.gps import GPSConfig
from hf_bayes.methods.mcmc.hmc import HMCConfig
from hf_bayes.methods.mcmc.metropolis import MetropolisConfig
from hf_bayes.methods.mcmc.penalty import PenaltyConfig
from hf_bayes.methods.sgmcmc import agps, sghmc
from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from tests.streams import share_one_stream

REPLICATES, ROWS, DRAWS = 2000, 200, 19
PRIOR = GaussianPrior(torch.zeros((), dtype=torch.float64), torch.ones((), dtype=torch.float64))


class Regressions:
    """An intercept and a slope for each replicate, noise N(0, 1); all rows in every evaluation."""

    def __init__(self) -> None:
        self.rng = generator("calibration")
        self.truth = self.normal(REPLICATES, 2)
        self.x = torch.stack([torch.ones(REPLICATES, ROWS, dtype=torch.float64), self.normal(REPLICATES, ROWS)], 2)
        self.y = (self.x @ self.truth[..., None])[..., 0] + self.normal(REPLICATES, ROWS)
        self.curvature = self.x.mT @ self.x
        self.best = torch.linalg.solve(self.curvature, self.x.mT @ self.y[..., None])[..., 0]

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=self.rng)

    def posterior(self) -> Tensor:
        """[M, 2]: an exact draw of each."""
        precision = self.curvature + torch.eye(2, dtype=torch.float64)
        mean = torch.linalg.solve(precision, self.curvature @ self.best[..., None])
        root = torch.linalg.cholesky(precision).mT
        return (mean + torch.linalg.solve_triangular(root, self.normal(REPLICATES, 2, 1), upper=True))[..., 0]

    def quantities(self, theta: Tensor) -> Tensor:
        """[M, 3]: what is ranked, intercept, slope and the log-likelihood of all rows."""
        return torch.cat([theta, Regressions.__call__(self, theta).log_lik[:, None]], 1)

    def begin_update(self) -> None:
        """Do nothing: one update is like the other."""

    def __call__(self, theta: Tensor, *, gradient: bool = True, batches: slice | None = None) -> Evaluation:
        off = theta - self.best
        slope = -(self.curvature @ off[..., None])[..., 0]
        return Evaluation(0.5 * (off * slope).sum(1), slope)


class Minibatches(Regressions):
    """20 batches of 10 rows, drawn anew for each update."""

    def begin_update(self) -> None:
        self.rows = torch.randint(ROWS, (REPLICATES, 20, 10), generator=self.rng)

    def __call__(self, theta: Tensor, *, gradient: bool = True, batches: slice | None = None) -> Evaluation:
        chains = torch.arange(REPLICATES)[:, None, None]
        residuals = self.y[chains, self.rows] - (self.x[chains, self.rows] * theta[:, None, None]).sum(-1)
        columns = -0.5 * ROWS * residuals.square().mean(2)
        return Evaluation(columns.mean(1), None, batch_log_lik=columns)


def uniformity(
    config: MethodConfig,
    data: Regressions,
    *,
    thin: int,
    learning_rate: float,
    burn_in: int = 0,
    start_std: float | None = None,
) -> float:
    """p-value of uniform ranks among 19 draws, in 20 bins: the worst of three quantities' (Bonferroni).

    Chains start in draws of the prior, or ``start_std`` about the best fit; without burn-in in exact ones, so that what
    is judged is whether they stay.
    """
    problem = Problem(ROWS, PRIOR, learning_rate, burn_in + DRAWS * thin, burn_in, {"": (2,)})
    method, rngs = config.build(problem), [data.rng]
    data.begin_update()
    start = data.normal(REPLICATES, 2) if burn_in else data.posterior()
    if start_std is not None:
        start = data.best + start_std * start
    state: Any = method.init(start, data, rngs) if isinstance(method, Kernel) else method.init(start, rngs)
    truth = data.quantities(data.truth)
    ranks = torch.zeros_like(truth)
    for step in range(problem.num_steps):
        data.begin_update()
        if isinstance(method, Rule):
            theta, state = method.locate(state, rngs)
            state, _ = method.update(state, data(theta), learning_rate, rngs)
        else:
            state, _ = method.step(state, data, rngs)
        if step >= burn_in and (step + 1 - burn_in) % thin == 0:
            ranks += data.quantities(state.theta) < truth
    counts = torch.stack([torch.bincount(column.long(), minlength=DRAWS + 1) for column in ranks.T])
    return len(counts) * float(min(chisquare(column.numpy()).pvalue for column in counts))


@pytest.fixture(autouse=True)
def one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    share_one_stream(monkeypatch, agps, gps, hmc, metropolis, penalty, sghmc)


RUNS: dict[str, tuple[MethodConfig, dict[str, Any]]] = {  # config, thinning that leaves next to no autocorrelation
    # a step is about a quarter of a period: five of them would come back to where they began
    "hmc": (HMCConfig(num_leapfrog=1), {"thin": 8, "learning_rate": 0.02, "burn_in": 100}),
    # the cap is four standard deviations; over the prior's fourteen a-GPS would be on its way for thousands of updates
    "gps": (GPSConfig(), {"thin": 10, "learning_rate": 0.3, "burn_in": 400, "start_std": 0.2}),
    "metropolis": (MetropolisConfig(), {"thin": 40, "learning_rate": 0.1, "burn_in": 400}),
    # x = h^2 lambda is 0.05: its variance is 1.4 % above the posterior's
    "sghmc": (SGHMCConfig(momentum=0.8), {"thin": 40, "learning_rate": 0.05, "burn_in": 200}),
}


@pytest.mark.parametrize("name", RUNS)
def test_ranks_of_the_truth_are_uniform(name: str) -> None:
    config, settings = RUNS[name]
    assert uniformity(config, Regressions(), **settings) > 0.001


@pytest.mark.parametrize("name", RUNS)
def test_ranks_catch_a_wrong_temperature(name: str) -> None:
    config, settings = RUNS[name]
    assert uniformity(dataclasses.replace(config, temperature=1.25), Regressions(), **settings) < 0.001


class Unseen(Regressions):
    """The sampler is shown no data: its draws are the prior's."""

    def __call__(self, theta: Tensor, *, gradient: bool = True, batches: slice | None = None) -> Evaluation:
        return Evaluation(torch.zeros(REPLICATES, dtype=torch.float64), torch.zeros_like(theta))


def test_ranks_of_the_log_likelihood_catch_data_that_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of theta do not show it, since the truth is a draw of the prior, too."""
    settings: dict[str, Any] = {"thin": 8, "learning_rate": 0.2, "burn_in": 100}
    assert uniformity(HMCConfig(num_leapfrog=1), Unseen(), **settings) < 0.001
    monkeypatch.setattr(Unseen, "quantities", lambda self, theta: theta)
    assert uniformity(HMCConfig(num_leapfrog=1), Unseen(), **settings) > 0.001


PENALISED = PenaltyConfig(step_size=0.06, target_acceptance=None)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ranks_are_uniform_under_minibatches_with_the_penalty() -> None:
    assert uniformity(PENALISED, Minibatches(), thin=30, learning_rate=0.06) > 0.001


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ranks_catch_a_dropped_penalty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(penalty, "noise_penalty", lambda variance, num_batches: 0 * variance)
    assert uniformity(PENALISED, Minibatches(), thin=30, learning_rate=0.06) < 0.001
