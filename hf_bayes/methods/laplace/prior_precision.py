"""tau, the precision of a Gaussian prior: of independent elements, or of a posterior that serves as the prior."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import singledispatch

import torch
from torch import Tensor

from hf_bayes.core.types import Prior
from hf_bayes.distributions.approximations import Gaussian, instead_of
from hf_bayes.distributions.covariance import Covariance, log_normal, moved
from hf_bayes.distributions.energy import FlatPrior, GaussianPrior, IndependentPrior
from hf_bayes.methods.laplace.curvature import Curvature
from hf_bayes.methods.laplace.evidence import Expansion


class PriorPrecision(ABC):
    """tau [d, d], the inverse of the covariance of a prior."""

    @property
    @abstractmethod
    def diagonal(self) -> Tensor:
        """The diagonal of tau, [d]."""

    @property
    @abstractmethod
    def variance(self) -> Tensor:
        """The diagonal of tau^-1, [d]."""

    @abstractmethod
    def grad_log_prior(self, offset: Tensor) -> Tensor:
        """Return the gradient [d] of log p(theta) at ``offset`` [d] from the prior's mean."""

    @abstractmethod
    def added_to(self, curvature: Curvature) -> tuple[Curvature, Tensor]:
        """Return (H', tau' [d]), whose sum is H + tau as far as the structure of H can represent tau."""

    @abstractmethod
    def log_evidence(self, expansion: Expansion, covariance: Covariance, temperature: float) -> Tensor:
        """Return log p(D), where ``covariance`` is the posterior's at this temperature."""


@dataclass(frozen=True, eq=False)
class ElementwisePrecision(PriorPrecision):
    """A diagonal tau.

    Attributes:
        values: [d].
    """

    values: Tensor

    @property
    def diagonal(self) -> Tensor:
        return self.values

    @property
    def variance(self) -> Tensor:
        return self.values.reciprocal()

    def grad_log_prior(self, offset: Tensor) -> Tensor:
        return -self.values * offset

    def added_to(self, curvature: Curvature) -> tuple[Curvature, Tensor]:
        return curvature, self.values

    def log_evidence(self, expansion: Expansion, covariance: Covariance, temperature: float) -> Tensor:
        return expansion.log_evidence(self.values)


@dataclass(frozen=True, eq=False)
class GaussianPrecision(PriorPrecision):
    """The inverse of a covariance.

    Attributes:
        covariance: tau^-1.
    """

    covariance: Covariance

    @property
    def diagonal(self) -> Tensor:
        return self.covariance.precision_diagonal

    @property
    def variance(self) -> Tensor:
        return self.covariance.variance

    def grad_log_prior(self, offset: Tensor) -> Tensor:
        return self.covariance.precision_product(-offset)

    def added_to(self, curvature: Curvature) -> tuple[Curvature, Tensor]:
        return curvature.plus(self.covariance)

    def log_evidence(self, expansion: Expansion, covariance: Covariance, temperature: float) -> Tensor:
        dim = len(expansion.offset)
        log_det = covariance.log_det - dim * math.log(temperature)
        log_prior = log_normal(self.covariance, expansion.offset) + 0.5 * dim * math.log(2 * math.pi)
        return expansion.log_lik + log_prior + 0.5 * log_det


@dataclass(frozen=True, eq=False)
class FlatPrecision(ElementwisePrecision):
    """tau = 0: the prior is part of a user's energy, and H its curvature.

    The evidence is log of the integral of exp(-U), where U has the normalisers that its author gave it.
    """

    def log_evidence(self, expansion: Expansion, covariance: Covariance, temperature: float) -> Tensor:
        dim = len(expansion.offset)
        log_det = covariance.log_det - dim * math.log(temperature)
        return expansion.log_lik + 0.5 * dim * math.log(2 * math.pi) + 0.5 * log_det


@singledispatch
def precision_of(prior: Prior, like: Tensor) -> PriorPrecision:
    """Return tau of a Gaussian, or of a prior with independent elements, in the dtype and on the device of ``like``."""
    raise TypeError(f"{type(prior).__name__} has no precision: it is no Gaussian, and its elements are not independent")


@precision_of.register
def _of_independent_elements(prior: IndependentPrior, like: Tensor) -> PriorPrecision:
    return ElementwisePrecision(prior.std.to(like).square().reciprocal().expand_as(like))


@precision_of.register
def _of_flat(prior: FlatPrior, like: Tensor) -> PriorPrecision:
    return FlatPrecision(torch.zeros_like(like))


@precision_of.register
def _of_gaussian(prior: Gaussian, like: Tensor) -> PriorPrecision:
    return GaussianPrecision(moved(prior.covariances[0], like))


def prior_moments(prior: Prior, like: Tensor) -> tuple[Tensor, PriorPrecision]:
    """Return the mean [d] and the precision of a Gaussian prior, or of a flat one.

    Raises:
        ValueError: for any other prior.
    """
    if isinstance(prior, FlatPrior):
        return torch.zeros_like(like), precision_of(prior, like)
    if isinstance(prior, GaussianPrior) or (isinstance(prior, Gaussian) and len(prior.means) == 1):
        return prior.mean.to(like).expand_as(like), precision_of(prior, like)
    raise ValueError(f"laplace adds the precision of one Gaussian, the prior, to H, {instead_of(prior)}")


def temper(curvature: Curvature, precision: PriorPrecision, *, temperature: float, what: str) -> Covariance:
    """Return the posterior's covariance at T: T (H + tau)^-1, or (H / T + tau)^-1 for ``what="likelihood"``.

    Args:
        what: "posterior" or "likelihood", the density that T tempers.
    """
    if what == "likelihood":
        curvature, temperature = curvature.scaled(1 / temperature), 1.0
    curvature, elementwise = precision.added_to(curvature)
    return curvature.covariance(elementwise, temperature=temperature)


def temper_draws(curvature: Curvature, precision: Tensor, noise: Tensor, *, temperature: float, what: str) -> Tensor:
    """Return the root of ``temper`` at tau [d] times standard normals [M, d], differentiable in tau."""
    if what == "likelihood":
        curvature, temperature = curvature.scaled(1 / temperature), 1.0
    return curvature.draws(precision, noise, temperature=temperature)
