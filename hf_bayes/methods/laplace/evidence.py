"""The Laplace evidence, and the prior precision that maximises it (MacKay 1992; Daxberger et al. 2021, eq. 7).

    log p(D) ~ log p(D | theta*) + log N(theta*; mean, tau^-1) + d/2 log 2 pi - 1/2 log det(H + tau)

H and theta* stay fixed while tau varies: one value for the model, for each tensor or for each element. At a stationary
point every group g satisfies MacKay's tau_g sum_g (theta* - mean)^2 = |g| - tau_g sum_g diag((H + tau)^-1).
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_bayes.core.layout import Layout
from hf_bayes.methods.laplace.curvature import Curvature, NotPositiveDefinite, not_positive

SCOPES = ("model", "tensor", "element")

BOUNDS = (1e-10, 1e10)
"""The bounds of a prior precision.

The evidence of a tensor that the data leave at the prior's mean has no maximum: it grows with the precision.
"""

MAX_ROUNDS = 500
"""The largest number of steps of the search. Without convergence it then warns."""

MAX_RESTARTS = 10
"""The largest number of runs of L-BFGS."""

MAX_STEP = 4.0
"""The largest step in log tau. Without it, rounding would set the step of elements that the data hardly determine."""


@dataclass(frozen=True)
class Expansion:
    """The second-order expansion of the log posterior around theta*.

    Attributes:
        curvature: H.
        log_lik: log p(D | theta*) in nats.
        offset: [d] theta* minus the prior's mean.
    """

    curvature: Curvature
    log_lik: float
    offset: Tensor

    def log_evidence(self, precision: Tensor) -> Tensor:
        """Return log p(D), differentiable in the prior's precision ([d] or a scalar tensor)."""
        precision = precision.double()
        dim = self.curvature.dim
        tau = precision.expand(dim)
        # d/2 log 2 pi cancels against the prior's normaliser
        log_prior = 0.5 * (tau.log().sum() - (tau * self.offset.double().square()).sum())
        return self.log_lik + log_prior - 0.5 * self.curvature.log_det(precision.to(self.offset)).double()


def groups(scope: str, layout: Layout) -> Tensor:
    """Return the index of the free precision of each element, [d]."""
    if scope == "model":
        return torch.zeros(layout.dim, dtype=torch.int64)
    if scope == "tensor":
        return torch.arange(len(layout.sizes)).repeat_interleave(torch.tensor(layout.sizes))
    if scope == "element":
        return torch.arange(layout.dim)
    raise ValueError(f"prior scope must be one of {', '.join(SCOPES)}, got {scope!r}")


def maximise(expansion: Expansion, start: Tensor, scope: str, layout: Layout) -> Tensor:
    """Return the prior precision with the largest evidence, [d], from ``start`` [d].

    Let s be the Schur complement of an element of H + tau, without its own tau, and m its distance to the prior's mean.
    Given all other elements, its evidence is (log tau - tau m^2 - log(s + tau)) / 2, and the maximum is a root of a
    quadratic (Tipping and Faul 2003). All groups step there together. For a diagonal H that is the maximum. Otherwise
    groups that overshoot take shorter steps, and L-BFGS resolves the remaining coupling.

    The search ends when a step promises less than 1e-7 nats (and rounding); it warns if it cannot get there.

    Raises:
        NotPositiveDefinite: if H + tau is not positive definite at the start, or where that ends the search.
    """
    index = groups(scope, layout).to(start.device)
    sizes = index.bincount().double()

    def mean_of(values: Tensor) -> Tensor:
        return torch.zeros_like(sizes).index_add(0, index, values.double().expand(layout.dim)) / sizes

    low, high = _log_bounds()
    log_tau, squares = mean_of(start.double().log()).clamp(low, high), mean_of(expansion.offset.double().square())
    rounding = torch.finfo(expansion.offset.dtype).eps * layout.dim
    tolerance = 1e-7 + 64 * rounding
    evidence = _Evidence(expansion, index)
    # below this gain, log tau is as exact as rounding allows
    log_tau, gain = _ascend(evidence, log_tau, squares, sizes, least_gain=1e-13 + 8 * rounding)
    for _ in range(MAX_RESTARTS):  # a new start forgets the curvature of distant points
        if gain < tolerance:
            break
        log_tau = _refine(evidence, log_tau, squares, sizes).clamp(low, high)
        gain = _step_and_gain(log_tau, evidence(log_tau)[1], squares, sizes)[1]
    if gain >= tolerance:
        if not evidence.defined:
            raise _undefined(expansion)
        warnings.warn(
            f"the evidence is not at its maximum: the prior precisions (prior_scope={scope!r}, {len(sizes)} of them) "
            f"may gain {gain:.2g} nats more (expected below {tolerance:.1g}). Fit from a prior_std nearer to it, or "
            "choose a coarser prior_scope"
        )
    return log_tau.exp()[index].to(start)


class _Evidence:
    """The log evidence and its gradient as functions of log tau [G], one value per group.

    Attributes:
        defined: False once H + tau was not positive definite. The value there is -inf.
    """

    def __init__(self, expansion: Expansion, index: Tensor) -> None:
        self.expansion, self.index = expansion, index
        self.defined = True

    def __call__(self, log_tau: Tensor) -> tuple[float, Tensor]:
        leaf = log_tau.detach().clone().requires_grad_()
        with torch.enable_grad():
            tensor = self.expansion.log_evidence(leaf.exp()[self.index])
            (gradient,) = torch.autograd.grad(tensor, leaf)
        value = float(tensor.detach())
        finite = math.isfinite(value) and bool(gradient.isfinite().all())
        self.defined &= finite
        return (value, gradient) if finite else (-math.inf, torch.zeros_like(gradient))


def _log_bounds() -> tuple[float, float]:
    low, high = BOUNDS
    return math.log(low), math.log(high)


def _ascend(
    evidence: _Evidence, log_tau: Tensor, squares: Tensor, sizes: Tensor, *, least_gain: float
) -> tuple[Tensor, float]:
    """Step all groups together to the maxima that they have on their own.

    Returns:
        log tau [G], and the gain in nats that the last step promised.
    """
    low, high = _log_bounds()
    value, gradient = evidence(log_tau)
    if not evidence.defined:
        raise _undefined(evidence.expansion)
    largest = torch.full_like(log_tau, MAX_STEP)
    for _ in range(MAX_ROUNDS):
        step, gain = _step_and_gain(log_tau, gradient, squares, sizes)
        if gain < least_gain:
            break
        trial = (log_tau + step.clamp(-largest, largest)).clamp(low, high)
        before, (value, gradient) = gradient, evidence(trial)
        if value == -math.inf:
            value, gradient, largest = *evidence(log_tau), 0.5 * largest
            continue
        log_tau = trial
        # groups that push one another past their maxima take shorter steps, each its own: other groups have far to go
        largest = torch.where(gradient * before < 0, 0.5 * largest, (1.5 * largest).clamp_max(MAX_STEP))
    return log_tau, gain


def _step_and_gain(log_tau: Tensor, gradient: Tensor, squares: Tensor, sizes: Tensor) -> tuple[Tensor, float]:
    """Return the step [G] of each group to its own maximum, and the gain in nats that it promises."""
    low, high = _log_bounds()
    step = _separate_maximum(log_tau, gradient / sizes, squares).clamp(low, high) - log_tau
    step = step.clamp(-MAX_STEP, MAX_STEP)
    return step, float((gradient * step).abs().sum())


def _undefined(expansion: Expansion) -> NotPositiveDefinite:
    return NotPositiveDefinite(
        "the evidence is not defined: H + tau is not positive definite. "
        + not_positive(hessian=expansion.curvature.hessian)
    )


def _separate_maximum(log_tau: Tensor, gradient: Tensor, squares: Tensor) -> Tensor:
    """Return the log tau [G] of each group that maximises the evidence while all other groups stay fixed.

    Args:
        gradient: [G] of the evidence in log tau, per element of the group.
        squares: [G] m^2.
    """
    tau = log_tau.exp()
    share = (1 - tau * squares - 2 * gradient).clamp(1e-300, 1.0)  # tau / (s + tau)
    schur = tau * (1 - share) / share
    # the positive root of m^2 tau^2 + m^2 s tau - s = 0, in the form without cancellation
    product = squares * schur
    best = 2 * schur / (product + (product.square() + 4 * product).sqrt())
    # a group that the data do not determine gets the lowest precision, and a group at the prior's mean the highest
    return torch.where(schur <= 0, -torch.inf, torch.where(squares <= 0, torch.inf, best.log()))


def _refine(evidence: _Evidence, log_tau: Tensor, squares: Tensor, sizes: Tensor) -> Tensor:
    """Return log tau after L-BFGS on the evidence, in units in which its own curvature per group is about 1."""
    low, high = _log_bounds()
    unit = (sizes * (log_tau.exp() * squares).clamp(1e-3, 1.0)).rsqrt()
    scaled = (log_tau / unit).requires_grad_()
    optimizer = torch.optim.LBFGS(
        [scaled], max_iter=MAX_ROUNDS, history_size=30, tolerance_grad=1e-12, tolerance_change=1e-12,
        line_search_fn="strong_wolfe",
    )  # fmt: skip

    def closure() -> float:
        log_tau = scaled.detach() * unit
        inside = log_tau.clamp(low, high)
        value, gradient = evidence(inside)
        scaled.grad = -torch.where(log_tau == inside, gradient, 0.0) * unit
        return -value

    with torch.enable_grad():
        optimizer.step(closure)
    return scaled.detach() * unit
