"""Four energies in two dimensions, their moments by quadrature, and the checks that every kernel must pass.

A further energy has four scales.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from hf_bayes.chains.sampling import SampleResult, sample
from hf_bayes.core.config import MethodConfig
from hf_bayes.core.rng import generator
from hf_bayes.core.types import Evaluate, Evaluation, Kernel, Problem, Rngs
from hf_bayes.distributions.energy import FlatPrior

PRECISION = torch.tensor([[2.0, 1.2], [1.2, 1.0]], dtype=torch.float64).inverse()
MEAN = torch.tensor([1.0, -1.0], dtype=torch.float64)


def gaussian(theta: Tensor, batch: object = None) -> Tensor:
    """Return U of a Gaussian with correlation 0.85."""
    return 0.5 * ((theta - MEAN) @ PRECISION * (theta - MEAN)).sum(1)


def banana(theta: Tensor, batch: object = None) -> Tensor:
    """Return U of x ~ N(0, 1), y ~ N(x^2 / 2, 1)."""
    x, y = theta.unbind(1)
    return 0.5 * x.square() + 0.5 * (y - 0.5 * x.square()).square()


def mixture(theta: Tensor, batch: object = None) -> Tensor:
    """Return U of 0.3 N((-1.75, 0), I) + 0.7 N((1.75, 0), I): from the left the barrier is 0.9 kT at T = 0.5."""
    x, y = theta.unbind(1)
    left, right = math.log(0.3) - 0.5 * (x + 1.75).square(), math.log(0.7) - 0.5 * (x - 1.75).square()
    return 0.5 * y.square() - torch.logaddexp(left, right)


INPUTS = torch.stack([torch.ones(12), torch.linspace(-2, 2, 12)], 1).double()
LABELS = torch.tensor([0, 0, 0, 1, 0, 0, 1, 0, 1, 1, 1, 1]).double()


def logistic(theta: Tensor, batch: object = None) -> Tensor:
    """Return U of a regression: twelve examples, an intercept and a slope, prior N(0, 2^2)."""
    logits = theta @ INPUTS.T
    return torch.nn.functional.softplus(logits).sum(1) - logits @ LABELS + theta.square().sum(1) / 8


STRETCHED = torch.tensor([100.0, 10.0, 1.0, 0.1], dtype=torch.float64)


def stretched(theta: Tensor, batch: object = None) -> Tensor:
    """Return U of N(0, diag(STRETCHED^2))."""
    return 0.5 * (theta / STRETCHED).square().sum(1)


TARGETS = {"gaussian": gaussian, "banana": banana, "mixture": mixture}
ALL_TARGETS = {**TARGETS, "logistic": logistic}


def features(theta: Tensor) -> Tensor:
    """Return the functions [..., 6] of theta [..., 2] whose expectations are compared."""
    x, y = theta.unbind(-1)
    return torch.stack([x, y, x.square(), y.square(), x * y, (x < 0).to(x)], -1)


@functools.cache
def moments(target: str, temperature: float) -> Tensor:
    """Return the expectations [6] of ``features`` under exp(-U / T), exact to 1e-5 by the midpoint rule."""
    x = torch.linspace(-10, 10, 801, dtype=torch.float64)
    y = torch.linspace(-10, 40, 2001, dtype=torch.float64)
    grid = torch.cartesian_prod((x[1:] + x[:-1]) / 2, (y[1:] + y[:-1]) / 2)
    weights = (-ALL_TARGETS[target](grid) / temperature).softmax(0)
    return weights @ features(grid)


def worst_z(draws: Tensor, target: str, temperature: float) -> tuple[float, float]:
    """Return the largest |error| of the six moments in Monte Carlo standard errors, and their smallest ESS (arviz)."""
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


def assert_a_long_run_is_exact(draws: Tensor, target: str) -> None:
    """The number of draws at T = 1: a 2 % error of a standard deviation is 5 standard errors of the second moment."""
    z, ess = worst_z(draws, target, 1.0)
    assert ess > 30_000  # an MCSE below 0.006 standard deviations
    assert z < 4


def assert_resume_is_bitwise(config: MethodConfig, cut: int) -> None:
    """Compare 50 updates on the banana (30 of burn-in) with a run that resumes from the state after ``cut``."""
    evaluate, kernel, rngs = evaluator(banana), config.build(problem(num_steps=50, burn_in=30)), chain_rngs(3)
    assert isinstance(kernel, Kernel)
    state = kernel.init(starts(3), evaluate, rngs)
    for step in range(50):
        if step == cut:
            saved = type(state)(**{name: value.clone() for name, value in state._asdict().items()})
            saved_rngs = [rng.get_state() for rng in rngs]
        state, _ = kernel.step(state, evaluate, rngs)
    resumed_rngs = [rng.set_state(stored) for rng, stored in zip(chain_rngs(3), saved_rngs, strict=True)]
    resumed = saved
    for _ in range(cut, 50):
        resumed, _ = kernel.step(resumed, evaluate, resumed_rngs)
    assert all(torch.equal(a, b) for a, b in zip(state, resumed, strict=True))


def starts(num_chains: int, dim: int = 2) -> Tensor:
    """Return over-dispersed starts [num_chains, dim]; the start of chain m does not depend on their number."""
    draws = [torch.randn(dim, generator=generator("start", m), dtype=torch.float64) for m in range(num_chains)]
    return 2 * torch.stack(draws)


def problem(*, learning_rate: float = 0.1, num_steps: int = 100, burn_in: int = 0, dim: int = 2) -> Problem:
    return Problem(1, FlatPrior(), learning_rate, num_steps, burn_in, {"": (dim,)})


def run(
    config: MethodConfig, target: str, *, learning_rate: float, num_steps: int, burn_in: int, num_chains: int
) -> SampleResult:
    """Return a run on one of ``ALL_TARGETS``, from ``starts``."""
    return sample(
        ALL_TARGETS[target],
        starts(num_chains),
        config,
        num_steps=num_steps,
        learning_rate=learning_rate,
        burn_in=burn_in,
        seed=1,
    )


def chain_rngs(num_chains: int) -> Rngs:
    return [generator(0, "chain", chain) for chain in range(num_chains)]


def evaluator(energy: Callable[[Tensor], Tensor]) -> Evaluate:
    """Return the log-likelihood -U and its gradient."""

    def evaluate(theta: Tensor, *, gradient: bool = True) -> Evaluation:
        if not gradient:
            return Evaluation(-energy(theta), None)
        leaf = theta.detach().requires_grad_()
        value = energy(leaf)
        (grad,) = torch.autograd.grad(value.sum(), leaf)
        return Evaluation(-value.detach(), -grad)

    return evaluate
