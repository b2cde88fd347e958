"""The noise of a regression with the largest Laplace evidence, the weights held fixed (MacKay 1992)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_bayes.methods.laplace.evidence import Expansion


def with_fitted_noise(
    surveys: Sequence[Any],
    expand: Callable[[int, Any], tuple[Expansion, Any]],
    *,
    noise_std: float,
    count: float,
) -> tuple[list[Any], float]:
    """The surveys as they would be with the learnt noise, and that; one for all of them.

    Args:
        surveys: of y = f + N(0, ``noise_std``^2), one ``survey.Survey`` for each member.
        expand: number of a member, survey -> the log posterior around it, and the prior's precision.
        count: numbers observed, of each.
    """
    constant = 0.5 * math.log(2 * math.pi)
    squares = [-2 * noise_std**2 * (one.log_lik + count * (math.log(noise_std) + constant)) for one in surveys]

    def at(sigma: float) -> list[Any]:
        ratio = (noise_std / sigma) ** 2
        return [
            one._replace(
                curvature=one.curvature.scaled(ratio),
                log_lik=-0.5 * square / sigma**2 - count * (math.log(sigma) + constant),
                slope=None if one.slope is None else one.slope.scaled(ratio),
            )
            for one, square in zip(surveys, squares, strict=True)
        ]

    def expanded(sigma: float) -> list[tuple[Expansion, Any]]:
        return [expand(number, one) for number, one in enumerate(at(sigma))]

    sigma = fit_noise(expanded, sum(squares), count * len(surveys))
    return at(sigma), sigma


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
