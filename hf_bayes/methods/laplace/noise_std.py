"""The noise of a regression that maximises the Laplace evidence at fixed weights (MacKay 1992)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_bayes.methods.laplace.evidence import Expansion
from hf_bayes.methods.laplace.pass_result import PassResult


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


def fit_noise(expand: Callable[[float], Sequence[tuple[Expansion, Tensor]]], squares: float, count: float) -> float:
    """Return the sigma of y = f + N(0, sigma^2) with the largest evidence at fixed theta* (MacKay 1992).

    sigma^2 = squares / (count - gamma), with gamma = sum_i (1 - tau_i [(H + tau)^-1]_ii) the number of parameters that
    the data determine. The residuals alone would give squares / count, which ignores that f was fitted to them.

    Args:
        expand: sigma -> expansions with H at that sigma, each with its prior precision.
        squares: sum of squared residuals, over all expansions.
        count: number of observed numbers, over all expansions.
    Raises:
        ValueError: if the residuals are 0, or if the data determine as many parameters as there are numbers.
    """
    if not 0 < squares < math.inf:
        raise ValueError(f"the squared residuals sum to {squares:.3g}: there is no noise to fit. Give noise_std")
    sigma = math.sqrt(squares / count)
    for _ in range(200):
        gamma = sum(_num_determined(expansion, precision) for expansion, precision in expand(sigma))
        if gamma >= count:
            raise ValueError(
                f"the data determine {gamma:.4g} parameters, and there are {count:.4g} numbers: noise cannot "
                "be distinguished from the model. Give noise_std, or lower prior_std"
            )
        before, sigma = sigma, math.sqrt(squares / (count - gamma))
        if abs(math.log(sigma / before)) < 1e-8:
            break
    return sigma


def _num_determined(expansion: Expansion, precision: Tensor) -> float:
    """Return gamma, the number of parameters that the data determine."""
    leaf = precision.detach().clone().requires_grad_()
    with torch.enable_grad():
        (diagonal,) = torch.autograd.grad(expansion.curvature.log_det(leaf), leaf)  # the diagonal of (H + tau)^-1
    return float((1 - precision * diagonal).double().sum())
