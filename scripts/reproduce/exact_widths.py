"""A logistic regression of 200 rows, the exact optimum of its free energy, and runs of a method on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import softplus

from hf_bayes.core.config import MethodConfig
from hf_bayes.core.rng import chain_generators, generator
from hf_bayes.core.types import Evaluation, Problem, Rule
from hf_bayes.distributions.approximations import Gaussian
from hf_bayes.distributions.covariance import dense
from hf_bayes.distributions.energy import GaussianPrior

NUM_ROWS, DIM = 200, 6
NODES, WEIGHTS = (torch.from_numpy(values) for values in np.polynomial.hermite_e.hermegauss(64))


@dataclass(frozen=True)
class Optimum:
    """The Gaussian of the lowest free energy, to 1e-9."""

    mean: Tensor
    covariance: Tensor
    free_energy: float

    @property
    def std(self) -> Tensor:
        return self.covariance.diagonal().sqrt()


@dataclass(frozen=True)
class Regression:
    """p(y = 1 | x, theta) = sigmoid(x theta), theta ~ N(0, prior_std^2), with correlated inputs and an intercept."""

    x: Tensor
    y: Tensor
    prior_std: float

    @classmethod
    def with_prior(cls, prior_std: float) -> Regression:
        rng = generator("logistic")
        x = torch.randn(NUM_ROWS, DIM, generator=rng, dtype=torch.float64)
        x[:, 1] = 0.7 * (x[:, 0] + x[:, 1])
        x[:, -1] = 1
        theta = torch.randn(DIM, generator=rng, dtype=torch.float64)
        y = (torch.rand(NUM_ROWS, generator=rng, dtype=torch.float64) < torch.sigmoid(x @ theta)).double()
        return cls(x, y, prior_std)

    @property
    def prior(self) -> GaussianPrior:
        return GaussianPrior(*(torch.tensor(value, dtype=torch.float64) for value in (0.0, self.prior_std)))

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The names and shapes of the parameters."""
        return {"": (DIM,)}

    @property
    def start(self) -> Tensor:
        """Return the point [d] where chains start."""
        return torch.zeros(DIM, dtype=torch.float64)

    def evaluate(self, theta: Tensor, rows: Tensor | None) -> Evaluation:
        """Return log p(D | theta) and its gradient from ``rows`` [M, B] of each chain; None means all rows."""
        x, y = (self.x, self.y) if rows is None else (self.x[rows], self.y[rows])
        logits = (x @ theta[..., None]).squeeze(-1)
        weight = NUM_ROWS / logits.shape[1]
        gradient = weight * ((y - logits.sigmoid())[:, None] @ x).squeeze(1)
        return Evaluation(weight * (y * logits - softplus(logits)).sum(1), gradient)

    def gradient_at_each(self, points: Tensor, rows: Tensor | None) -> Tensor:
        """Return the gradient of log p(D | theta) at points [M, J, d]."""
        gradients = [self.evaluate(point, rows).grad_log_lik for point in points.unbind(1)]
        return torch.stack([gradient for gradient in gradients if gradient is not None], 1)

    def loss(self, mean: Tensor, covariance: Tensor) -> Tensor:
        """Return E_q[-log p(D | weights)] for Gaussian weights, by quadrature over each logit."""
        std = ((self.x @ covariance) * self.x).sum(1).sqrt()
        losses = softplus((self.x @ mean)[:, None] + std[:, None] * NODES) @ WEIGHTS / WEIGHTS.sum()
        return (losses - self.y * (self.x @ mean)).sum()

    def free_energy(self, mean: Tensor, covariance: Tensor) -> Tensor:
        """Return E_q[U] - H[q] up to a constant."""
        prior = 0.5 * (mean.square().sum() + covariance.diagonal().sum()) / self.prior_std**2
        return self.loss(mean, covariance) + prior - 0.5 * torch.logdet(covariance)

    def optimum(self, *, full: bool = False) -> Optimum:
        """Return the best diagonal or full Gaussian."""

        def unpacked(numbers: Tensor) -> tuple[Tensor, Tensor]:
            mean, log_std, rest = numbers[:DIM], numbers[DIM : 2 * DIM], numbers[2 * DIM :].view(DIM, DIM).tril(-1)
            root = torch.diag(log_std.exp()) + (rest if full else 0)
            return mean, root @ root.T

        return minimise(self.free_energy, unpacked, torch.zeros(DIM * (DIM + 2), dtype=torch.float64))

    def widths(self, mean: Tensor, std: Tensor) -> Tensor:
        """Return the standard deviations [..., 6] of the weights."""
        return std

    def batches(self, num_chains: int, size: int | None) -> Iterator[Tensor | None]:
        """Yield rows [num_chains, size] of each update, from permutations of each chain; None where size is None."""
        rng = generator("order")
        while size is None:
            yield None
        while True:
            order = torch.stack([torch.randperm(NUM_ROWS, generator=rng) for _ in range(num_chains)])
            yield from order[:, : NUM_ROWS // size * size].split(size, 1)


def minimise(
    free_energy: Callable[[Tensor, Tensor], Tensor], unpacked: Callable[[Tensor], tuple[Tensor, Tensor]], start: Tensor
) -> Optimum:
    """Return the Gaussian of the lowest free energy; ``unpacked`` makes mean and covariance from free numbers."""
    numbers = start.clone().requires_grad_()
    search = torch.optim.LBFGS(
        [numbers], max_iter=2000, tolerance_grad=1e-10, tolerance_change=1e-16, line_search_fn="strong_wolfe"
    )

    def closure() -> float:
        search.zero_grad()
        value = free_energy(*unpacked(numbers))
        value.backward()
        return float(value.detach())

    search.step(closure)
    mean, covariance = (part.detach() for part in unpacked(numbers))
    return Optimum(mean, covariance, float(free_energy(mean, covariance)))


@dataclass(frozen=True)
class Errors:
    """The largest errors of the chains of a run."""

    std: float
    bias_of_std: float
    free_energy: float


def fit(
    target: Regression, method: MethodConfig, *, num_steps: int, learning_rate: float, batch: int | None = None,
    num_chains: int = 4,
) -> Gaussian:  # fmt: skip
    """Return the Gaussians of some chains."""
    problem = Problem(NUM_ROWS, target.prior, learning_rate, num_steps, 0, target.shapes)
    rule, rngs = method.build(problem), chain_generators(0, num_chains, device="cpu")
    assert isinstance(rule, Rule)
    state: Any = rule.init(target.start.repeat(num_chains, 1), rngs)
    for _, rows in zip(range(num_steps), target.batches(num_chains, batch), strict=False):
        theta, state = rule.locate(state, rngs)
        evaluation, anchor = target.evaluate(theta, rows), rule.anchor(state)
        if anchor is not None:
            evaluation = evaluation._replace(anchor_grad=target.gradient_at_each(anchor, rows))
        state, _ = rule.update(state, evaluation, learning_rate, rngs)
    found = rule.finish(state, state.theta[:, None])
    assert isinstance(found, Gaussian)
    return found


def relative_widths(target: Regression, found: Gaussian, best: Optimum) -> Tensor:
    """Return the standard deviations [M, 6] of the weights under some Gaussians, divided by those of the best one."""
    return target.widths(found.means, found.stds) / target.widths(best.mean, best.std)


def errors(target: Regression, found: Gaussian, best: Optimum) -> Errors:
    """Return how far some Gaussians are from the best one: relative errors of stds, and nats."""
    relative = relative_widths(target, found, best) - 1
    values = [
        float(target.free_energy(mean, dense(covariance, mean)))
        for mean, covariance in zip(found.means, found.covariances, strict=True)
    ]
    return Errors(float(relative.abs().max()), float(relative.mean(0).abs().max()), max(values) - best.free_energy)
