"""Runs of samplers on a Gaussian whose curvature and gradient noise are known."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from hf_bayes.chains.objective import FailureWords
from hf_bayes.chains.run import Run
from hf_bayes.core.rng import chain_generators, generator
from hf_bayes.core.types import Evaluation, Problem
from hf_bayes.distributions.energy import GaussianPrior
from hf_bayes.methods.assembly import assemble
from hf_bayes.methods.laplace.curvature import DiagonalCurvature
from hf_bayes.methods.sgmcmc.baoab import BAOABConfig
from hf_bayes.methods.sgmcmc.gradient_noise import LangevinConfig
from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from hf_bayes.methods.sgmcmc.sgld import SGLDConfig
from hf_bayes.methods.sgmcmc.sgnht import SGNHTConfig

PRIOR_STD = 0.5
CURVATURE = torch.cat([torch.full((20,), h) for h in (1e6, 1e3, 40.0, 0.01)]).double()
"""H: with tau = 4 the data outweigh the prior by far, clearly and a little; the prior outweighs the last ones."""
SAMPLERS = [SGHMCConfig, SGLDConfig, BAOABConfig, SGNHTConfig]


class GaussianData:
    """log p(D | theta) = -sum H theta^2 / 2, with gradient noise of variance ``noise`` H.

    The noise at an anchor is the same if ``common``, so that a control variate removes it, otherwise it is independent.
    """

    words = FailureWords("log-likelihood", "gradient", "update", "look")

    def __init__(self, noise: float = 0.0, chains: range = range(4), *, common: bool = False) -> None:
        self.noise, self.common, self.passes, self.anchors = noise, common, 0, 0
        self.rngs = [generator("noise", chain) for chain in chains]

    def for_update(self, batches: list[Any], *, step: int, inside: Tensor | None = None) -> Any:
        return self

    def __call__(self, theta: Tensor, *, anchor: Tensor | None = None, **options: Any) -> Any:
        noise = torch.stack([torch.randn(2, len(CURVATURE), generator=rng, dtype=torch.float64) for rng in self.rngs])
        noise = (self.noise * CURVATURE).sqrt() * noise
        grad = -CURVATURE * theta + noise[:, 0]
        self.anchors += anchor is not None
        beside = None if anchor is None else -CURVATURE * anchor + noise[:, 0 if self.common else 1]
        return Evaluation(-0.5 * (CURVATURE * theta.square()).sum(1), grad, anchor_grad=beside)

    def info(self) -> dict[str, Tensor]:
        return {}

    def full_gradient(self, theta: Tensor, *, share: float = 1.0) -> Tensor:
        return -CURVATURE * theta

    def curvature(self, theta: Tensor, spec: Any, *, gradient: bool = True) -> Any:
        self.passes += 1
        return SimpleNamespace(curvature=DiagonalCurvature(CURVATURE))

    def heldout(self, theta: Tensor, part: str, **options: Any) -> Any:
        raise AssertionError

    heldout_by_row = heldout

    def place_of(self, column: int) -> str:
        return ""


class StiffElsewhere(GaussianData):
    """A curvature that is 400 times as large once the chain has begun to move, as where another factor has grown."""

    def __call__(self, theta: Tensor, **options: Any) -> Any:
        found = super().__call__(theta, **options)
        stiff = 400 if bool((theta != 0).any()) else 1
        found = found._replace(log_lik=stiff * found.log_lik, grad_log_lik=stiff * found.grad_log_lik)
        return found._replace(anchor_grad=None if found.anchor_grad is None else 400 * found.anchor_grad)


def run_of(config: LangevinConfig, objective: GaussianData, *, steps: int, chains: range = range(4)) -> Run[Any]:
    prior = GaussianPrior(torch.tensor(0.0).double(), torch.tensor(PRIOR_STD).double())
    problem = Problem(
        num_data=1000, prior=prior, learning_rate=1.0, num_steps=steps, burn_in=steps // 4,
        shapes={"w": (len(CURVATURE),)}, draw_steps=range(steps // 4 + 10, steps + 1, 10), own_step_size=True,
    )  # fmt: skip
    theta = torch.zeros(len(chains), len(CURVATURE), dtype=torch.float64)
    rngs = chain_generators(0, 4, chains=chains)
    return Run(assemble(config, problem), objective, theta, rngs, problem, chains=chains)


def finished(
    config: LangevinConfig, noise: float = 0.0, *, steps: int = 4000, chains: range = range(4), common: bool = False
) -> Run[Any]:
    run = run_of(config, GaussianData(noise, chains, common=common), steps=steps, chains=chains)
    for _ in range(steps):
        run.update([None], 1.0)
    return run


def relative_variances(run: Run[Any]) -> list[float]:
    """Return E theta^2 (H + tau) of each of the four kinds of directions."""
    draws = torch.stack(run.draws, 1)
    squares = (draws.square() * (CURVATURE + PRIOR_STD**-2)).mean((0, 1))
    return [float(part.mean()) for part in squares.split(20)]


def every_update(run: Run[Any], steps: int) -> list[dict[str, Tensor]]:
    """Return the values that each of the next updates reports."""
    return [run.update([None], 1.0).info for _ in range(steps)]
