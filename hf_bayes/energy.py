"""U(theta) = -log p(D | theta) - log p(theta) in nats on the full data set: the Gaussian prior, tempered gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_bayes.types import Evaluation, Prior


@dataclass(frozen=True)
class GaussianPrior:
    """N(mean, std^2), elementwise independent.

    Attributes:
        mean: [d] or a scalar tensor.
        std: [d] or a scalar tensor, positive.
    """

    mean: Tensor
    std: Tensor

    def log_prob(self, theta: Tensor) -> Tensor:
        """[M, d] -> [M], normalised."""
        z = (theta - self.mean) / self.std
        log_std = self.std.log().expand(theta.shape[1]).sum()
        return -0.5 * z.square().sum(1) - log_std - 0.5 * theta.shape[1] * math.log(2 * math.pi)

    def grad(self, theta: Tensor) -> Tensor:
        """[M, d] -> [M, d]"""
        return (self.mean - theta) / self.std.square()

    def to(self, like: Tensor) -> GaussianPrior:
        """The same prior in the dtype and on the device of ``like``."""
        return GaussianPrior(self.mean.to(like), self.std.to(like))


@dataclass(frozen=True)
class FlatPrior:
    """No prior: log p = 0. For energies that already are the whole U."""

    def log_prob(self, theta: Tensor) -> Tensor:
        return torch.zeros(len(theta), dtype=theta.dtype, device=theta.device)

    def grad(self, theta: Tensor) -> Tensor:
        return torch.zeros_like(theta)


def energy(evaluation: Evaluation, theta: Tensor, prior: Prior, *, prior_weight: float = 1.0) -> Tensor:
    """[M]: U_lik + prior_weight * U_prior, what a method at temperature T runs on (``MethodConfig.prior_weight``)."""
    return -evaluation.log_lik - prior_weight * prior.log_prob(theta)


def grad_energy(evaluation: Evaluation, theta: Tensor, prior: Prior, *, prior_weight: float = 1.0) -> Tensor:
    """[M, d]: the gradient of ``energy`` in theta."""
    assert evaluation.grad_log_lik is not None
    return -evaluation.grad_log_lik - prior_weight * prior.grad(theta)
