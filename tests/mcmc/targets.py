"""Three energies in two dimensions, their moments by quadrature, and the check that every kernel must pass."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from hf_bayes.energy import FlatPrior
from hf_bayes.rng import generator
from hf_bayes.types import Evaluate, Evaluation, Problem, Rngs

PRECISION = torch.tensor([[2.0, 1.2], [1.2, 1.0]], dtype=torch.float64).inverse()
MEAN = torch.tensor([1.0, -1.0], dtype=torch.float64)


def gaussian(theta: Tensor, batch: object = None) -> Tensor:
    """Correlation 0.85."""
    return 0.5 * ((theta - MEAN) @ PRECISION * (theta - MEAN)).sum(1)


def banana(theta: Tensor, batch: object = None) -> Tensor:
    """x ~ N(0, 1), y ~ N(x^2 / 2, 1)."""
    x, y = theta.unbind(1)
    return 0.5 * x.square() + 0.5 * (y - 0.5 * x.square()).square()


def mixture(theta: Tensor, batch: object = None) -> Tensor:
    """0.3 N((-1.75, 0), I) + 0.7 N((1.75, 0), I): seen from the left the barrier is 0.9 kT at T = 0.5."""
    x, y = theta.unbind(1)
    left, right = math.log(0.3) - 0.5 * (x + 1.75).square(), math.log(0.7) - 0.5 * (x - 1.75).square()
    return 0.5 * y.square() - torch.logaddexp(left, right)


TARGETS = {"gaussian": gaussian, "banana": banana, "mixture": mixture}


def features(theta: Tensor) -> Tensor:
    """[..., 2] -> [..., 6]: the functions whose expectations are compared."""
    x, y = theta.unbind(-1)
    return torch.stack([x, y, x.square(), y.square(), x * y, (x < 0).to(x)], -1)


@functools.cache
def moments(target: str, temperature: float) -> Tensor:
    """[6] expectations of ``features`` under exp(-U / T), midpoint rule: to 1e-5, as x = 0 is the edge of a cell."""
    x = torch.linspace(-10, 10, 801, dtype=torch.float64)
    y = torch.linspace(-10, 40, 2001, dtype=torch.float64)
    grid = torch.cartesian_prod((x[1:] + x[:-1]) / 2, (y[1:] + y[:-1]) / 2)
    weights = (-TARGETS[target](grid) / temperature).softmax(0)
    return weights @ features(grid)


def worst_z(draws: Tensor, target: str, temperature: float) -> tuple[float, float]:
    """Largest |error| over the six moments in Monte Carlo standard errors, and the smallest ESS behind them (arviz)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # arviz announces its next version
        import arviz

    values, exact = features(draws), moments(target, temperature)
    columns = [values[..., k].numpy() for k in range(values.shape[-1])]
    scores = [
        abs(column.mean() - exact[k].item()) / float(arviz.mcse(column, method="mean"))
        for k, column in enumerate(columns)
    ]
    return max(scores), min(float(arviz.ess(column, method="mean")) for column in columns)


def starts(num_chains: int, dim: int = 2) -> Tensor:
    """[num_chains, dim], over-dispersed; chain m starts in the same place however many there are."""
    draws = [torch.randn(dim, generator=generator("start", m), dtype=torch.float64) for m in range(num_chains)]
    return 2 * torch.stack(draws)


def problem(*, learning_rate: float = 0.1, num_steps: int = 100, burn_in: int = 0, dim: int = 2) -> Problem:
    return Problem(1, FlatPrior(), learning_rate, num_steps, burn_in, (dim,))


def chain_rngs(num_chains: int) -> Rngs:
    return [generator(0, "chain", chain) for chain in range(num_chains)]


def evaluator(energy: Callable[[Tensor], Tensor]) -> Evaluate:
    """The log-likelihood -U and its gradient."""

    def evaluate(theta: Tensor, *, gradient: bool = True) -> Evaluation:
        if not gradient:
            return Evaluation(-energy(theta), None)
        leaf = theta.detach().requires_grad_()
        value = energy(leaf)
        (grad,) = torch.autograd.grad(value.sum(), leaf)
        return Evaluation(-value.detach(), -grad)

    return evaluate
