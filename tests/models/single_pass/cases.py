"""Models with a Gaussian posterior for predictions in a single pass, and Monte Carlo over their weights."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from hf_bayes import attach
from hf_bayes.core.layout import initial, select
from hf_bayes.distributions.approximations import Gaussian
from hf_bayes.distributions.covariance import Covariance, Diagonal

DOUBLE = torch.float64


def attached(model: nn.Module, subspace: str, variance: float = 1e-4, covariance: Covariance | None = None) -> Any:
    """A model with the posterior N(its own weights, covariance), by default with one variance."""
    layout = select(model, subspace)
    start = initial(model, layout)[None]
    own = covariance or Diagonal(torch.full_like(start[0], variance**0.5))
    bayesian: Any = attach(model, start.clone(), subspace=subspace)
    config = SimpleNamespace(calibration={}, layer_factors={}, approximation="gaussian")
    bayesian.posterior = SimpleNamespace(approximation=Gaussian(start, (own,)), config=config)
    return bayesian


def member_moments(bayesian: Any, inputs: dict[str, Tensor], num_draws: int) -> tuple[Tensor, Tensor]:
    """The mean and the variance of the logits over draws of the posterior."""
    approximation = bayesian.posterior.approximation
    theta = approximation.sample(num_draws, torch.Generator().manual_seed(0))
    found = []
    with torch.no_grad():
        for some in theta.split(500):
            with bayesian.members.bind(some):
                found.append(bayesian.members.logits(inputs))
    logits = torch.cat(found)
    return logits.mean(0), logits.var(0)


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal numbers in float64."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


def covariance_matrix(size: int, seed: int = 0) -> Tensor:
    """A covariance matrix without zeros."""
    root = normal(size, size, seed=seed)
    return root @ root.mT / size + 0.1 * torch.eye(size, dtype=DOUBLE)
