"""U(theta) = -log p(D | theta) - log p(theta) in nats on the full data set: priors, tempered gradients."""

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
    """Independent elements of one shape, each with a location and a scale of its own.

    Attributes:
        mean: [d] or a scalar tensor.
        std: [d] or a scalar tensor, positive.
    """

    mean: Tensor
    std: Tensor

    @abstractmethod
    def log_prob(self, theta: Tensor) -> Tensor:
        """[M, d] -> [M], normalised."""

    @abstractmethod
    def grad(self, theta: Tensor) -> Tensor:
        """[M, d] -> [M, d]"""

    def sample(self, num_draws: int, dim: int, generator: torch.Generator) -> Tensor:
        """[num_draws, dim]"""
        like = torch.empty(num_draws, dim, dtype=self.std.dtype, device=generator.device)
        return self.mean + self.std * self._standard(like, generator).to(self.std.device)

    @abstractmethod
    def _standard(self, like: Tensor, generator: torch.Generator) -> Tensor:
        """Draws of mean 0 and variance 1, in place of ``like``."""

    def to(self, like: Tensor) -> Self:
        """The same prior in the dtype and on the device of ``like``."""
        return type(self)(self.mean.to(like), self.std.to(like))


class GaussianPrior(IndependentPrior):
    """N(mean, std^2)."""

    def log_prob(self, theta: Tensor) -> Tensor:
        z = (theta - self.mean) / self.std
        log_std = self.std.log().expand(theta.shape[1]).sum()
        return -0.5 * z.square().sum(1) - log_std - 0.5 * theta.shape[1] * math.log(2 * math.pi)

    def grad(self, theta: Tensor) -> Tensor:
        return (self.mean - theta) / self.std.square()

    def _standard(self, like: Tensor, generator: torch.Generator) -> Tensor:
        return like.normal_(generator=generator)


class LaplacePrior(IndependentPrior):
    """Double exponential: log p = -|theta - mean| / b - log 2 b elementwise, b = std / sqrt(2)."""

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
    """No prior: log p = 0. For energies that already are the whole U."""

    def log_prob(self, theta: Tensor) -> Tensor:
        return torch.zeros(len(theta), dtype=theta.dtype, device=theta.device)

    def grad(self, theta: Tensor) -> Tensor:
        return torch.zeros_like(theta)


class ByColumn(NamedTuple):
    """A prior for work on a few columns of theta at a time (``blocks.in_blocks``).

    Attributes:
        parameters: tensors [..., d], to be cut together with theta.
        log_prob: what the columns do not tell of log p(theta); a number, or [M].
        of: (columns of theta [M, w], of the parameters) -> (the columns' part of log p [M] or a number, grad [M, w]).
    """

    parameters: tuple[Tensor, ...]
    log_prob: float | Tensor
    of: Callable[..., tuple[float | Tensor, Tensor]]


def by_column(prior: Prior, theta: Callable[[], Tensor]) -> ByColumn:
    """Independent elements are cut, which takes no pass over memory; any other prior is asked once, at ``theta()``."""
    if not isinstance(prior, IndependentPrior):
        at = theta()
        return ByColumn((prior.grad(at),), prior.log_prob(at), lambda columns, grad: (0.0, grad))

    def of(columns: Tensor, mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
        part = type(prior)(mean, std)
        return part.log_prob(columns), part.grad(columns)

    return ByColumn((prior.mean, prior.std), 0.0, of)


def energy(evaluation: Evaluation, theta: Tensor, prior: Prior, *, prior_weight: float = 1.0) -> Tensor:
    """[M]: U_lik + prior_weight * U_prior, what a method at temperature T runs on (``MethodConfig.prior_weight``)."""
    return -evaluation.log_lik - prior_weight * prior.log_prob(theta)


def grad_energy(evaluation: Evaluation, theta: Tensor, prior: Prior, *, prior_weight: float = 1.0) -> Tensor:
    """[M, d]: the gradient of ``energy`` in theta."""
    assert evaluation.grad_log_lik is not None
    return -evaluation.grad_log_lik - prior_weight * prior.grad(theta)
