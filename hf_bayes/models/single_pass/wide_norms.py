"""LayerNorm and RMSNorm of a Gaussian that may be as wide as its mean: the tangents with the expected scale.

Let y = g x / s with s^2 = mean_i x_i^2 + eps, for x ~ N(m, V) of D units; LayerNorm subtracts the mean of the units
first. The derivative at m grows as 1 / |m|, so a small hidden state seems to have an outcome far wider than a norm can
have. With the derivative J at x, Cov y <= E[J V J'] (the Poincare inequality of Gaussians). So the scale is

    r^2 = E[1 / s^2] = (1 + c) / E[s^2],    c = Var[s^2] / E[s^2]^2,

to second order in s^2 - E[s^2], where

    E[s^2] = mean_i (m_i^2 + V_ii) + eps,    Var[s^2] = (4 m' V m + 2 tr V^2) / D^2.

The tangents are dy = g r (dx - n mean(n dx)) with n = r m. For a narrow x these are the derivatives at m.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_bayes.uncertainty.likelihoods import widened


def norm_tangents(mean: Tensor, columns: Tensor, gain: Tensor | None, eps: float, *, centred: bool) -> Tensor:
    """Return the columns [S, ..., D] behind a norm over the last dimension.

    Args:
        mean: [..., D] m.
        columns: [S, ..., D], a root of V.
        gain: [D] g; None is 1.
        eps: the constant in s.
        centred: True for LayerNorm, False for RMSNorm.
    """
    if centred:
        mean, columns = mean - mean.mean(-1, keepdim=True), columns - columns.mean(-1, keepdim=True)
    rate = expected_rate(mean, columns, eps).to(columns.dtype)
    unit = mean.to(columns.dtype) * rate
    along = torch.linalg.vecdot(columns, unit)[..., None] / mean.shape[-1]
    found = columns.addcmul(unit, along, value=-1)
    return found.mul_(rate if gain is None else rate * gain.to(rate.dtype))


def expected_rate(mean: Tensor, columns: Tensor, eps: float) -> Tensor:
    """Return [..., 1] r of means [..., D] and columns [S, ..., D]."""
    mean, columns, width = widened(mean), widened(columns), mean.shape[-1]
    second = (mean.square().sum(-1) + columns.square().sum((0, -1))) / width + eps
    # tr V^2 by the smaller of the two products of the columns
    pairs = "s...d,t...d->...st" if len(columns) <= width else "s...d,s...e->...de"
    trace = torch.einsum(pairs, columns, columns).square().sum((-2, -1))
    noise = 4 * torch.linalg.vecdot(columns, mean).square().sum(0) + 2 * trace
    return ((1 + noise / (width * second).square()) / second).sqrt()[..., None]
