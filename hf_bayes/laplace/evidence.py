"""The Laplace evidence, and the prior precision that maximises it (MacKay 1992; Daxberger et al. 2021, eq. 7).

    log p(D) ~ log p(D | theta*) + log N(theta*; mean, tau^-1) + d/2 log 2 pi - 1/2 log det(H + tau)

H and theta* are held fixed while tau moves, one value for the model, for each tensor or for each element. In a
stationary point every group g obeys MacKay's tau_g sum_g (theta* - mean)^2 = |g| - tau_g sum_g diag((H + tau)^-1).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_bayes.laplace.curvature import Curvature, NotPositiveDefinite, not_positive
from hf_bayes.subspace import Layout

SCOPES = ("model", "tensor", "element")

BOUNDS = (1e-10, 1e10)
"""Of a prior precision: the evidence of a tensor that the data leave at the prior's mean grows without end."""


@dataclass(frozen=True)
class Expansion:
    """The log posterior to second order around theta*.

    Attributes:
        curvature: H.
        log_lik: log p(D | theta*) in nats.
        offset: [d] theta* minus the prior's mean.
    """

    curvature: Curvature
    log_lik: float
    offset: Tensor

    def log_evidence(self, precision: Tensor) -> Tensor:
        """log p(D), differentiable in the prior's precision ([d] or a scalar tensor)."""
        precision = precision.double()
        dim = self.curvature.dim
        spread = precision.expand(dim)
        # d/2 log 2 pi cancels against the prior's normaliser
        log_prior = 0.5 * (spread.log().sum() - (spread * self.offset.double().square()).sum())
        return self.log_lik + log_prior - 0.5 * self.curvature.log_det(precision.to(self.offset)).double()


def groups(scope: str, layout: Layout) -> Tensor:
    """[d] which of the free precisions each element has."""
    if scope == "model":
        return torch.zeros(layout.dim, dtype=torch.int64)
    if scope == "tensor":
        return torch.arange(len(layout.sizes)).repeat_interleave(torch.tensor(layout.sizes))
    if scope == "element":
        return torch.arange(layout.dim)
    raise ValueError(f"prior scope must be one of {', '.join(SCOPES)}, got {scope!r}")


def maximise(expansion: Expansion, start: Tensor, scope: str, layout: Layout) -> Tensor:
    """[d]: the prior precision with the largest evidence, by steps in log tau from ``start`` [d].

    Steps are RPROP's (each group has its own, halved where the slope changes sign): the groups nearly separate, and a
    step must not depend on slopes that are flat far from the optimum. Ends when no group moves by 1e-6.

    Raises:
        NotPositiveDefinite: if H + tau is not at the start.
    """
    index = groups(scope, layout).to(start.device)
    count = int(index.max()) + 1
    sums = torch.zeros(count, dtype=torch.float64, device=start.device)
    log_tau = sums.index_add(0, index, start.double().log().expand(layout.dim)) / index.bincount()
    low, high = (math.log(bound) for bound in BOUNDS)
    step, before = torch.full_like(log_tau, 1.0), torch.zeros_like(log_tau)
    for _ in range(500):
        slope = _slope(expansion, log_tau, index)
        if not bool(slope.isfinite().all()):
            raise NotPositiveDefinite(
                "the evidence is not defined: H + tau is not positive definite. "
                + not_positive(hessian=expansion.curvature.hessian)
            )
        turned = slope * before < 0
        step = torch.where(turned, 0.5 * step, (1.2 * step).clamp_max(4.0))
        before = slope
        moved = (log_tau + step * slope.sign()).clamp(low, high)
        if float((moved - log_tau).abs().max()) < 1e-6:
            break
        log_tau = moved
    return log_tau.exp()[index].to(start)


def fit_noise(expand: Callable[[float], Sequence[tuple[Expansion, Tensor]]], squares: float, count: float) -> float:
    """sigma of y = f + N(0, sigma^2) with the largest evidence, theta* held fixed (MacKay 1992).

    sigma^2 = squares / (count - gamma), with gamma = sum_i (1 - tau_i [(H + tau)^-1]_ii) the number of parameters that
    the data determine; the residuals alone would give squares / count, as if nothing had been fitted to them.

    Args:
        expand: sigma -> expansions with H at that sigma, and the prior precision of each.
        squares: sum of squared residuals, over all expansions.
        count: numbers observed, over all expansions.
    Raises:
        ValueError: if the residuals are 0, or the data determine as many parameters as there are numbers.
    """
    if not 0 < squares < math.inf:
        raise ValueError(f"the squared residuals sum to {squares:.3g}: there is no noise to learn. Give noise_std")
    sigma = math.sqrt(squares / count)
    for _ in range(200):
        gamma = sum(_num_determined(expansion, precision) for expansion, precision in expand(sigma))
        if gamma >= count:
            raise ValueError(
                f"the data determine {gamma:.4g} parameters, and there are {count:.4g} numbers: noise cannot be told "
                "from the model. Give noise_std, or lower prior_std"
            )
        before, sigma = sigma, math.sqrt(squares / (count - gamma))
        if abs(math.log(sigma / before)) < 1e-8:
            break
    return sigma


def _num_determined(expansion: Expansion, precision: Tensor) -> float:
    leaf = precision.detach().clone().requires_grad_()
    with torch.enable_grad():
        (diagonal,) = torch.autograd.grad(expansion.curvature.log_det(leaf), leaf)  # of (H + tau)^-1
    return float((1 - precision * diagonal).double().sum())


def _slope(expansion: Expansion, log_tau: Tensor, index: Tensor) -> Tensor:
    leaf = log_tau.detach().requires_grad_()
    with torch.enable_grad():
        value = expansion.log_evidence(leaf.exp()[index])
        (slope,) = torch.autograd.grad(value, leaf)
    return slope if bool(value.isfinite()) else torch.full_like(slope, torch.nan)
