"""The Laplace evidence, and the prior precision that maximises it (MacKay 1992; Daxberger et al. 2021, eq. 7).

    log p(D) ~ log p(D | theta*) + log N(theta*; mean, tau^-1) + d/2 log 2 pi - 1/2 log det(H + tau)

H and theta* are held fixed while tau moves, one value for the model, for each tensor or for each element. In a
stationary point every group g obeys MacKay's tau_g sum_g (theta* - mean)^2 = |g| - tau_g sum_g diag((H + tau)^-1).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_bayes.core.layout import Layout
from hf_bayes.methods.laplace.curvature import Curvature, NotPositiveDefinite, not_positive

SCOPES = ("model", "tensor", "element")

BOUNDS = (1e-10, 1e10)
"""Of a prior precision: the evidence of a tensor that the data leave at the prior's mean grows without end."""

MAX_ROUNDS = 500
"""Of the search for the largest evidence, after which it is told that it has not converged."""

MAX_POLISHES = 10

MAX_STEP = 4.0
"""In log tau: where the data say next to nothing of an element, rounding decides what they say."""


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
    """[d]: the prior precision with the largest evidence, from ``start`` [d].

    With s the Schur complement of an element of H + tau, less its own tau, its evidence given all others is
    (log tau - tau m^2 - log(s + tau)) / 2, m its distance to the prior's mean: its maximum is a root of a quadratic
    (Tipping and Faul 2003). All groups step there at once, which for a diagonal H is the end, and otherwise
    shorter where they overshoot; what coupling is left is L-BFGS's.

    Ends where a step promises less than 1e-7 nats (and rounding); warns where it cannot.

    Raises:
        NotPositiveDefinite: if H + tau is not at the start, or where the search ends for that.
    """
    index = groups(scope, layout).to(start.device)
    sizes = index.bincount().double()

    def mean_of(values: Tensor) -> Tensor:
        return torch.zeros_like(sizes).index_add(0, index, values.double().expand(layout.dim)) / sizes

    low, high = (math.log(bound) for bound in BOUNDS)
    log_tau, squares = mean_of(start.double().log()).clamp(low, high), mean_of(expansion.offset.double().square())
    eps = torch.finfo(expansion.offset.dtype).eps
    tolerance = 1e-7 + 64 * eps * layout.dim
    defined = True

    def look(where: Tensor) -> tuple[float, Tensor]:
        nonlocal defined
        value, slope = _value_and_slope(expansion, where, index)
        fine = math.isfinite(value) and bool(slope.isfinite().all())
        defined &= fine
        return (value, slope) if fine else (-math.inf, torch.zeros_like(slope))

    def step_from(where: Tensor, slope: Tensor) -> tuple[Tensor, float]:
        """And what it promises, in nats."""
        step = _alone(where, slope / sizes, squares).clamp(low, high) - where
        step = step.clamp(-MAX_STEP, MAX_STEP)
        return step, float((slope * step).abs().sum())

    value, slope = look(log_tau)
    if not defined:
        raise _undefined(expansion)
    reach = torch.full_like(log_tau, MAX_STEP)
    for _ in range(MAX_ROUNDS):
        step, left = step_from(log_tau, slope)
        if left < 1e-13 + 8 * eps * layout.dim:  # log tau is then as exact as rounding lets it be
            break
        trial = (log_tau + step.clamp(-reach, reach)).clamp(low, high)
        before, (value, slope) = slope, look(trial)
        if value == -math.inf:
            value, slope, reach = *look(log_tau), 0.5 * reach
            continue
        log_tau = trial
        # groups that push one another past their maxima take shorter steps, each its own: others have far to go
        reach = torch.where(slope * before < 0, 0.5 * reach, (1.5 * reach).clamp_max(MAX_STEP))
    for _ in range(MAX_POLISHES):  # begun anew it forgets curvature from far away
        if left < tolerance:
            break
        log_tau = _polished(look, log_tau, squares, sizes).clamp(low, high)
        left = step_from(log_tau, look(log_tau)[1])[1]
    if left >= tolerance:
        if not defined:
            raise _undefined(expansion)
        warnings.warn(
            f"the evidence is not at its maximum: the prior precisions (prior_scope={scope!r}, {len(sizes)} of them) "
            f"may gain {left:.2g} nats more (expected below {tolerance:.1g}). Fit from a prior_std nearer to it, or "
            "choose a coarser prior_scope"
        )
    return log_tau.exp()[index].to(start)


def _undefined(expansion: Expansion) -> NotPositiveDefinite:
    return NotPositiveDefinite(
        "the evidence is not defined: H + tau is not positive definite. "
        + not_positive(hessian=expansion.curvature.hessian)
    )


def _alone(log_tau: Tensor, slope: Tensor, squares: Tensor) -> Tensor:
    """[G]: log tau with the largest evidence of each group as if nothing else moved.

    Args:
        slope: [G] of the evidence in log tau, per element.
        squares: [G] m^2.
    """
    tau = log_tau.exp()
    share = (1 - tau * squares - 2 * slope).clamp(1e-300, 1.0)  # tau / (s + tau)
    schur = tau * (1 - share) / share
    # the positive root of m^2 tau^2 + m^2 s tau - s = 0, in the form that cancels nothing
    product = squares * schur
    best = 2 * schur / (product + (product.square() + 4 * product).sqrt())
    # one that the data do not see goes to where its prior is flat, one that they leave at the mean to where it holds
    return torch.where(schur <= 0, -torch.inf, torch.where(squares <= 0, torch.inf, best.log()))


def _polished(look: Callable, log_tau: Tensor, squares: Tensor, sizes: Tensor) -> Tensor:
    """L-BFGS on the evidence, in units in which its own curvature per group is about 1."""
    low, high = (math.log(bound) for bound in BOUNDS)
    unit = (sizes * (log_tau.exp() * squares).clamp(1e-3, 1.0)).rsqrt()
    scaled = (log_tau / unit).requires_grad_()
    optimizer = torch.optim.LBFGS(
        [scaled], max_iter=MAX_ROUNDS, history_size=30, tolerance_grad=1e-12, tolerance_change=1e-12,
        line_search_fn="strong_wolfe",
    )  # fmt: skip

    def closure() -> float:
        where = scaled.detach() * unit
        inside = where.clamp(low, high)
        value, slope = look(inside)
        scaled.grad = -torch.where(where == inside, slope, 0.0) * unit
        return -value

    with torch.enable_grad():
        optimizer.step(closure)
    return scaled.detach() * unit


def _value_and_slope(expansion: Expansion, log_tau: Tensor, index: Tensor) -> tuple[float, Tensor]:
    leaf = log_tau.detach().clone().requires_grad_()
    with torch.enable_grad():
        value = expansion.log_evidence(leaf.exp()[index])
        (slope,) = torch.autograd.grad(value, leaf)
    return float(value.detach()), slope
