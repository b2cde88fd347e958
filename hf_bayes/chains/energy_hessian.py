"""A pass over a user's energy at one point: its value, its gradient and its Hessian, by automatic differentiation.

An energy is a function of theta [K, d] whose rows do not depend on each other. So one double backward pass at K copies
of a point gives the products of its Hessian with K vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_bayes.methods.laplace.curvature import Curvature, DiagonalCurvature, FullCurvature
from hf_bayes.methods.laplace.gradient_estimate import GradientEstimate
from hf_bayes.methods.laplace.low_rank_hessian import low_rank_hessian
from hf_bayes.methods.laplace.supported import CurvatureSpec

Value = Callable[[Tensor, Any], Tensor]
"""(theta [K, d], batch) -> U [K], differentiable twice."""

VECTORS_AT_ONCE = 32
"""The number of copies of a point in one call of the energy."""

OF_ENERGY = "energy"
"""The value of ``Curvature.hessian`` for the Hessian of an energy; error messages use it."""


FLOOR = 1e-8
"""The smallest curvature of a preconditioner, relative to the largest. Without it, a direction that the energy hardly
determines at one point would get steps without bounds."""


class EnergyPassResult(NamedTuple):
    """The result of a pass over an energy, with the fields of ``laplace.pass_result.PassResult``.

    Attributes:
        curvature: the Hessian of the energy.
        log_lik: minus the energy.
        gradient: minus its gradient; None if it was not requested.
        fallbacks: empty, because an energy has no modules.
    """

    curvature: Curvature
    log_lik: float
    gradient: GradientEstimate | None
    fallbacks: dict[str, str]


class EnergyAtPoint:
    """An energy around one point: the mean over batches, each of which gives an unbiased estimate.

    Args:
        value: the energy.
        theta: [d] the point.
        batches: all batches.
    """

    def __init__(self, value: Value, theta: Tensor, batches: Iterable[Any]) -> None:
        self._value, self._theta, self._batches = value, theta.detach(), list(batches)

    def value_and_gradient(self) -> tuple[Tensor, Tensor]:
        """Return U, a scalar tensor, and its gradient [d]."""
        total, gradient = self._theta.new_zeros(()), torch.zeros_like(self._theta)
        for batch in self._batches:
            value, _, first = self._first(1, batch)
            total, gradient = total + value.detach()[0], gradient + first.detach()[0]
        return total / len(self._batches), gradient / len(self._batches)

    def products(self, vectors: Tensor) -> Tensor:
        """Return the products [K, d] of the Hessian with ``vectors`` [K, d]."""
        parts = [self._some_products(part) for part in vectors.split(VECTORS_AT_ONCE)]
        return torch.cat(parts)

    def hessian(self) -> Tensor:
        """Return the Hessian [d, d]."""
        matrix = self.products(torch.eye(len(self._theta)).to(self._theta))
        return (matrix + matrix.mT) / 2

    def diagonal(self) -> Tensor:
        """Return the diagonal of the Hessian [d], without the matrix."""
        columns = torch.arange(len(self._theta), device=self._theta.device)
        found = []
        for some in columns.split(VECTORS_AT_ONCE):
            units = torch.nn.functional.one_hot(some, len(self._theta)).to(self._theta)
            found.append(self.products(units).gather(1, some[:, None])[:, 0])
        return torch.cat(found)

    def _some_products(self, vectors: Tensor) -> Tensor:
        total = torch.zeros_like(vectors)
        for batch in self._batches:
            _, leaf, first = self._first(len(vectors), batch)
            if not first.requires_grad:  # a linear energy
                continue
            try:
                (second,) = torch.autograd.grad(first, leaf, vectors, allow_unused=True)
            except RuntimeError as error:
                raise ValueError(
                    f"the Hessian needs an energy that can be differentiated twice, got one that cannot ({error}): "
                    "compute it from operations of torch that have a second derivative"
                ) from error
            total = total if second is None else total + second
        return total / len(self._batches)

    def _first(self, copies: int, batch: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Return U [K], the leaf [K, d], and the gradient [K, d] with its graph, at K copies of the point."""
        with torch.enable_grad():
            leaf = self._theta.expand(copies, -1).clone().requires_grad_()
            value = self._value(leaf, batch)
            if not value.requires_grad:
                raise ValueError("energy must be differentiable in theta: the energy it returned has no gradient")
            (first,) = torch.autograd.grad(value.sum(), leaf, create_graph=True)
        return value, leaf, first


def expand_energy(point: EnergyAtPoint, like: Tensor, spec: CurvatureSpec, *, gradient: bool) -> EnergyPassResult:
    """Return value, gradient and Hessian of an energy.

    Args:
        point: the energy around theta*.
        like: [d] theta*.
        spec: its structure and its rank. Its estimator is not used: the curvature of an energy is always the Hessian.
        gradient: return the gradient, too.
    Raises:
        ValueError: for a value, gradient or Hessian that is not finite.
    """
    value, first = point.value_and_gradient()
    curvature: Curvature
    if spec.structure == "full":
        curvature = FullCurvature(point.hessian(), hessian=OF_ENERGY)
    elif spec.structure == "low_rank":
        curvature = low_rank_hessian(point.products, like, spec.rank, hessian=OF_ENERGY)
    else:
        curvature = DiagonalCurvature(point.diagonal(), hessian=OF_ENERGY)
    for what, found in (("energy", value), ("gradient", first), ("Hessian", curvature.diagonal)):
        if not bool(found.isfinite().all()):
            raise ValueError(
                f"the {what} of the energy is not finite where a chain ended: there is nothing to expand around. Lower "
                "learning_rate, or look at the energy there"
            )
    estimate = GradientEstimate(-first.expand(2, -1), 1, 1) if gradient else None
    return EnergyPassResult(curvature, -float(value), estimate, {})


def positive_curvature(point: EnergyAtPoint, spec: CurvatureSpec) -> EnergyPassResult:
    """Return the Hessian with absolute values in place of negative ones, for a preconditioner, which must be positive.

    Args:
        point: the energy around the point.
        spec: with the structure "full", absolute values are taken of the eigenvalues; with any other, of the diagonal.
    Raises:
        ValueError: for a Hessian that is not finite, or zero.
    """
    found = point.hessian().double() if spec.structure == "full" else point.diagonal()
    if not bool(found.isfinite().all()) or not bool(found.any()):
        raise ValueError(
            "the Hessian of the energy is zero or not finite after the warm start, so it gives no scale for a step "
            "size: give learning_rate"
        )
    if spec.structure != "full":
        return EnergyPassResult(DiagonalCurvature(_above_floor(found)), 0.0, None, {})
    values, vectors = torch.linalg.eigh(found)
    return EnergyPassResult(FullCurvature(vectors * _above_floor(values) @ vectors.mT), 0.0, None, {})


def _above_floor(values: Tensor) -> Tensor:
    magnitudes = values.abs()
    return magnitudes.clamp_min(FLOOR * float(magnitudes.max()))
