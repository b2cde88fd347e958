"""Elementwise functions of a Gaussian, linearised at its mean (eqs. 3, 4, 46 to 52), and products of two Gaussians."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Function = Callable[[Tensor], Tensor]


def derivative(function: Function, mean: Tensor) -> Tensor:
    """Return g'(mean) of an elementwise function g, by forward-mode differentiation."""
    with torch.inference_mode(False), torch.no_grad():
        inputs = mean.detach().clone()
        found: Tensor = torch.func.jvp(function, (inputs,), (torch.ones_like(inputs),))[1]
    return found


def elementwise(mean: Tensor, covariance: Tensor, function: Function) -> tuple[Tensor, Tensor]:
    """Return g(E h) and J Cov[h] J with J = diag g'(E h) (eqs. 3 and 4).

    Args:
        mean: [..., n].
        covariance: [..., n, n], or its diagonal [..., n].
        function: g.
    """
    rate = derivative(function, mean)
    if covariance.ndim == mean.ndim:
        return function(mean), rate.square() * covariance
    return function(mean), rate[..., :, None] * covariance * rate[..., None, :]


def product_variance(first: Tensor, first_variance: Tensor, second: Tensor, second_variance: Tensor) -> Tensor:
    """Return the variance of x y for independent x and y, as in a gate: (E x)^2 Var y + (E y)^2 Var x + Var x Var y."""
    found = first.square() * second_variance + second.square() * first_variance
    return found + first_variance * second_variance
