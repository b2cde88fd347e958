"""The energy U(theta) = -log p(D | theta) - log p(theta) in nats on the full data set, its gradient, and priors."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor

from hf_bayes.core.types import Evaluation, Prior


@dataclass(frozen=True)
class IndependentPrior(ABC):
    """A prior with independent elements: one family of densities, with a mean and a std per element.

    Attributes:
        mean: [d] or a scalar tensor.
        std: [d] or a scalar tensor, positive.
    """

    mean: Tensor
    std: Tensor

    @abstractmethod
    def log_prob(self, theta: Tensor) -> Tensor:
        """Return the normalised log-density, [M, d] -> [M]."""

    @abstractmethod
    def grad(self, theta: Tensor) -> Tensor:
        """Return the gradient of ``log_prob``, [M, d] -> [M, d]."""

    def sample(self, num_draws: int, dim: int, generator: torch.Generator) -> Tensor:
        """Return draws [num_draws, dim]."""
        like = torch.empty(num_draws, dim, dtype=self.std.dtype, device=generator.device)
        return self.mean + self.std * self._standard(like, generator).to(self.std.device)

    @abstractmethod
    def _standard(self, like: Tensor, generator: torch.Generator) -> Tensor:
        """Fill ``like`` with draws of mean 0 and variance 1, and return it."""

    def scaled(self, factor: float) -> Self:
        """Return the same prior with ``factor`` times the standard deviations."""
        return type(self)(self.mean, factor * self.std)

    def to(self, like: Tensor) -> Self:
        """Return the same prior in the dtype and on the device of ``like``."""
        return type(self)(self.mean.to(like), self.std.to(like))


class GaussianPrior(IndependentPrior):
    """The normal distribution N(mean, std^2)."""

    def log_prob(self, theta: Tensor) -> Tensor:
        z = (theta - self.mean) / self.std
        log_std = self.std.log().expand(theta.shape[1]).sum()
        return -0.5 * z.square().sum(1) - log_std - 0.5 * theta.shape[1] * math.log(2 * math.pi)

    def grad(self, theta: Tensor) -> Tensor:
        return (self.mean - theta) / self.std.square()

    def _standard(self, like: Tensor, generator: torch.Generator) -> Tensor:
        return like.normal_(generator=generator)


class LaplacePrior(IndependentPrior):
    """The double exponential distribution: log p = -|theta - mean| / b - log 2 b elementwise, b = std / sqrt(2)."""

    def log_prob(self, theta: Tensor) -> Tensor:
        scale = self.std / math.sqrt(2)
        return -((theta - self.mean).abs() / scale).sum(1) - (2 * scale).log().expand(theta.shape[1]).sum()

    def grad(self, theta: Tensor) -> Tensor:
        return (self.mean - theta).sign() * math.sqrt(2) / self.std

    def _standard(self, like: Tensor, generator: torch.Generator) -> Tensor:
        first, second = (torch.empty_like(like).exponential_(generator=generator) for _ in range(2))
        return (first - second) / math.sqrt(2)


@dataclass(frozen=True)
class FlatPrior:
    """A flat prior, log p = 0: for a user's energy that already includes the prior."""

    def log_prob(self, theta: Tensor) -> Tensor:
        return torch.zeros(len(theta), dtype=theta.dtype, device=theta.device)

    def grad(self, theta: Tensor) -> Tensor:
        return torch.zeros_like(theta)

    def to(self, like: Tensor) -> Self:
        return self


class ByColumn(NamedTuple):
    """A prior in a form for work on a few columns of theta at a time (``column_blocks.in_blocks``).

    Attributes:
        parameters: tensors [..., d], which are cut into the same columns as theta.
        log_prob: the part of log p(theta) that ``of`` does not return; a number, or [M].
        of: (columns of theta [M, w], columns of the parameters) -> (their part of log p, a number or [M]; grad [M, w]).
    """

    parameters: tuple[Tensor, ...]
    log_prob: float | Tensor
    of: Callable[..., tuple[float | Tensor, Tensor]]


def by_column(prior: Prior, theta: Callable[[], Tensor]) -> ByColumn:
    """Return the prior in its form by columns.

    A prior with independent elements is evaluated column by column, without an extra pass over memory. Any other prior
    is evaluated once, at ``theta()``.
    """
    if not isinstance(prior, IndependentPrior):
        at = theta()
        return ByColumn((prior.grad(at),), prior.log_prob(at), lambda columns, grad: (0.0, grad))

    def of(columns: Tensor, mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
        part = type(prior)(mean, std)
        return part.log_prob(columns), part.grad(columns)

    return ByColumn((prior.mean, prior.std), 0.0, of)


def energy(evaluation: Evaluation, theta: Tensor, prior: Prior, *, prior_weight: float = 1.0) -> Tensor:
    """Return U_lik + prior_weight * U_prior, [M]: the energy of a method at temperature T.

    See ``MethodConfig.prior_weight``.
    """
    return -evaluation.log_lik - prior_weight * log_prior(prior, theta, evaluation.log_lik)


def log_prior(prior: Prior, theta: Tensor, log_lik: Tensor) -> Tensor:
    """Return log p(theta) [M], in the dtype of the log-likelihood if that is the more precise one.

    Kernels accept by differences of energies below one nat, and a sum over a million elements has less than that in
    float32.
    """
    at = theta.to(torch.promote_types(theta.dtype, log_lik.dtype))
    return prior.to(at).log_prob(at)


def grad_energy(evaluation: Evaluation, theta: Tensor, prior: Prior, *, prior_weight: float = 1.0) -> Tensor:
    """Return the gradient of ``energy`` in theta, [M, d]."""
    assert evaluation.grad_log_lik is not None
    return -evaluation.grad_log_lik - prior_weight * prior.grad(theta)
