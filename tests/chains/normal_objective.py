"""A standard normal likelihood, in as many batches as are given, for tests of runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_bayes.chains.objective import FailureWords
from hf_bayes.chains.run import Run
from hf_bayes.core.rng import generator
from hf_bayes.core.types import Evaluation, Info, Problem
from hf_bayes.distributions.energy import GaussianPrior
from hf_bayes.methods.assembly import assemble

CHAINS = 3
SHAPES = {"weight": (3, 4), "bias": (3,)}
SIZES = (12, 3)


class NormalObjective:
    """-|theta|^2 / 2 from each of four batches; a rule's batches are parts of it."""

    words = FailureWords("log-likelihood", "gradient of the log-likelihood", "step", "stop")

    def __init__(self) -> None:
        self.last_theta: Tensor | None = None

    def for_update(self, batches: list[Any], *, step: int, inside: Tensor | None = None) -> OfUpdate:
        return OfUpdate(self, len(batches))

    def place_of(self, column: int) -> str:
        return ", weight" if column < 12 else ", bias"


class OfUpdate:
    def __init__(self, objective: NormalObjective, parts: int) -> None:
        self._objective, self._parts = objective, parts

    def info(self) -> Info:
        return {}

    def __call__(
        self,
        theta: Tensor,
        *,
        gradient: bool = True,
        batches: slice | None = None,
        anchor: Tensor | None = None,
        **options: Any,
    ) -> Evaluation:
        self._objective.last_theta = theta.clone()
        value = sum(-0.5 * theta.square().sum(1) / self._parts for _ in range(self._parts))
        assert isinstance(value, Tensor)
        columns = value[:, None].expand(-1, 4)[:, batches or slice(None)]
        beside = None if anchor is None else -anchor
        grad = -theta if gradient else None
        return Evaluation(value, grad, batch_log_lik=columns, loss=-value.double(), anchor_grad=beside)


def normal_run(config: Any, *, draw_steps: range = range(3, 6, 2), burn_in: int = 2, seed: int = 0) -> Run:
    """Chains on it, of 15 parameters."""
    prior = GaussianPrior(torch.zeros(()), torch.ones(()))
    problem = Problem(100.0, prior, 0.01, 5, burn_in, SHAPES, draw_steps, batch_fraction=0.05, update_fraction=0.2)
    theta = 0.1 * torch.randn(CHAINS, 15, generator=torch.Generator().manual_seed(1))
    rngs = [generator(seed, "chain", chain) for chain in range(CHAINS)]
    return Run(
        assemble(config, problem), NormalObjective(), theta, rngs, problem, warm_start=config.num_warm_start_steps
    )
