"""The kernel Stein discrepancy: a distance from draws to a density whose gradient is known."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def stein_discrepancy(theta: Tensor, score: Tensor) -> float:
    """Return the kernel Stein discrepancy with k = (1 + |x - y|^2 / d)^(-1/2) (Gorham and Mackey 2017).

    k is the inverse multiquadric. KSD^2 = mean over all pairs, including equal indices, of

        k s_x.s_y + (x - y).(s_y - s_x) 2 k' - 2 d k' - 4 k'' |x - y|^2,     k', k'' by |x - y|^2

    with s = grad log p. It is 0 only in the limit of draws from p. S independent draws have E KSD^2 = E[k_p(x, x)] / S
    = (E|s|^2 + 1) / S. Coordinates must have unit scale, because the kernel is isotropic.

    Args:
        theta: [S, d].
        score: [S, d] grad log p at theta.
    """
    dim = theta.shape[1]
    distance = torch.cdist(theta, theta).square()
    base = 1 + distance / dim
    kernel, first, second = base**-0.5, -0.5 * base**-1.5 / dim, 0.75 * base**-2.5 / dim**2
    projected = theta @ score.T  # [i, j] = x_i . s_j
    own = projected.diagonal()
    # (x_i - x_j).(s_j - s_i)
    mixed = projected + projected.T - own - own[:, None]
    terms = kernel * (score @ score.T) + 2 * first * mixed - 2 * dim * first - 4 * second * distance
    return math.sqrt(max(0.0, float(terms.mean())))
