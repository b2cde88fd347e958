"""The noise of a regression that maximises the Laplace evidence at fixed weights (MacKay 1992)."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_bayes.methods.laplace.curvature import NotPositiveDefinite, not_positive
from hf_bayes.methods.laplace.evidence import Expansion
from hf_bayes.methods.laplace.pass_result import PassResult

Expand = Callable[[float], Sequence[tuple[Expansion, Tensor]]]

MAX_STEPS = 5
"""The largest number of steps in log sigma, each twice as long as the one before: a factor of 2^31 in all."""

WARN_SHARE = 0.9
"""``fit_noise`` warns if gamma exceeds this share of ``count``: sigma is then over 3 times the root mean square
residual."""


def with_fitted_noise(
    results: Sequence[PassResult],
    expand: Callable[[int, PassResult], tuple[Expansion, Any]],
    *,
    noise_std: float,
    count: float,
) -> tuple[list[PassResult], float]:
    """Return the results at the fitted noise, and the fitted noise, which all members share.

    Args:
        results: the results of a curvature pass for y = f + N(0, ``noise_std``^2), one for each member.
        expand: (index of a member, its result) -> (the log posterior around it, the prior's precision).
        count: number of observed numbers, for each member.
    """
    constant = 0.5 * math.log(2 * math.pi)
    squares = [-2 * noise_std**2 * (one.log_lik + count * (math.log(noise_std) + constant)) for one in results]

    def at(sigma: float) -> list[PassResult]:
        ratio = (noise_std / sigma) ** 2
        return [
            one._replace(
                curvature=one.curvature.scaled(ratio),
                log_lik=-0.5 * square / sigma**2 - count * (math.log(sigma) + constant),
                gradient=None if one.gradient is None else one.gradient.scaled(ratio),
            )
            for one, square in zip(results, squares, strict=True)
        ]

    def expanded(sigma: float) -> list[tuple[Expansion, Any]]:
        return [expand(number, one) for number, one in enumerate(at(sigma))]

    sigma = fit_noise(expanded, sum(squares), count * len(results))
    return at(sigma), sigma


def fit_noise(expand: Expand, squares: float, count: float) -> float:
    """Return the sigma of y = f + N(0, sigma^2) with the largest evidence at fixed theta* (MacKay 1992).

    The evidence has the derivative squares / sigma^2 + gamma(sigma) - count in log sigma, and its maximum at

        sigma^2 = squares / (count - gamma),  gamma = sum_i (1 - tau_i [(H + tau)^-1]_ii)

    with gamma the number of parameters that the data determine. gamma may exceed ``count`` at the root mean square of
    the residuals, and falls as sigma grows: the root is bracketed from there, and found by Brent's method. The
    residuals alone would give squares / count, which ignores that f was fitted to them.

    Args:
        expand: sigma -> expansions with H at that sigma, each with its prior precision.
        squares: sum of squared residuals, over all expansions.
        count: number of observed numbers, over all expansions.
    Raises:
        ValueError: if the residuals are 0, or if the data determine ``count`` parameters at every noise.
        NotPositiveDefinite: if the evidence has no maximum where H + tau is positive definite; from ``expand``, too.
    """
    from scipy.optimize import brentq

    if not 0 < squares < math.inf:
        raise ValueError(f"the squared residuals sum to {squares:.3g}: there is no noise to fit. Give noise_std")

    def slope(log_sigma: float) -> float:
        sigma = math.exp(log_sigma)
        # the bound gives the search a finite number where H + tau is not positive definite
        return min(squares / sigma**2 + _num_determined(expand, sigma) - count, count)

    residual = math.sqrt(squares / count)
    sigma = math.exp(brentq(slope, *_bracket(slope, residual, count), xtol=1e-9))
    gamma = _num_determined(expand, sigma)
    # at a root of the slope this is 0 but for the rounding of gamma; a Hessian may change the sign without a root
    if not abs(squares / sigma**2 + gamma - count) < 0.1 * count:
        (expansion, _), *_ = expand(sigma)
        raise NotPositiveDefinite(
            f"the evidence has no maximum in the noise: it falls from noise_std {sigma:.3g} on, and below H + tau is "
            f"not positive definite. {not_positive(hessian=expansion.curvature.hessian)}. Or give noise_std"
        )
    if gamma > WARN_SHARE * count:
        warnings.warn(
            f"the fitted noise_std is {sigma:.3g}, and the root mean square of the residuals is {residual:.3g}: the "
            f"data determine {gamma:.4g} parameters from {count:.4g} numbers, so the noise can hardly be distinguished "
            "from the model, and depends on the prior and the structure. Compare it with the errors on held-out rows, "
            "give noise_std, or lower prior_std"
        )
    return sigma


def _bracket(slope: Callable[[float], float], residual: float, count: float) -> tuple[float, float]:
    """Return two log sigma, the first with a rising evidence and the second with a falling one.

    Args:
        slope: log sigma -> the derivative of the evidence.
        residual: the root mean square of the residuals, where the search begins.
    Raises:
        ValueError: if the evidence rises with sigma to the end.
    """
    near = math.log(residual)
    # gamma of a Hessian may be negative: then the maximum is below
    upwards = slope(near) > 0
    step = math.log(2) if upwards else -math.log(2)
    for _ in range(MAX_STEPS):
        far = near + step
        value = slope(far)
        # without a prior the slope tends to 0 from above, and rounding may change its sign
        if (value < -1e-9 * count) if upwards else (value > 0):
            return min(near, far), max(near, far)
        near, step = far, 2 * step
    raise ValueError(
        f"the data determine {value + count:.4g} parameters even at noise_std {math.exp(near):.3g}, and there are "
        f"{count:.4g} numbers: noise cannot be distinguished from the model. Give noise_std, or lower prior_std"
    )


def _num_determined(expand: Expand, sigma: float) -> float:
    """Return gamma, the number of parameters that the data determine; inf if H + tau is not positive definite."""
    gamma = 0.0
    for expansion, precision in expand(sigma):
        leaf = precision.detach().clone().requires_grad_()
        with torch.enable_grad():
            log_det = expansion.curvature.log_det(leaf)
            if not bool(log_det.isfinite()):
                return math.inf
            (diagonal,) = torch.autograd.grad(log_det, leaf)  # the diagonal of (H + tau)^-1
        gamma += float((1 - precision * diagonal).double().sum())
    return gamma if math.isfinite(gamma) else math.inf
