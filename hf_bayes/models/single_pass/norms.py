"""LayerNorm and RMSNorm of independent Gaussians, linearised at the mean.

With x^ = (x - mu) / sigma and gain g, y_i = g_i x^_i + b_i has the Jacobian g_i / sigma (delta_ij - a_ij), where
a_ij = (1 + x^_i x^_j) / D for LayerNorm. RMSNorm has mu = 0 and a_ij = x^_i x^_j / D. Then

    Var y_i = (g_i / sigma)^2 [s_i - 2 a_ii s_i + sum_j a_ij^2 s_j].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def layer_norm_variance(mean: Tensor, variance: Tensor, gain: Tensor | None, eps: float) -> Tensor:
    """Return [..., D] variances of LayerNorm over the last dimension."""
    width = mean.shape[-1]
    centre, spread = mean.mean(-1, keepdim=True), mean.var(-1, correction=0, keepdim=True)
    scale = (spread + eps).rsqrt()
    unit = (mean - centre) * scale
    square = unit.square()
    total, cross = variance.sum(-1, keepdim=True), (unit * variance).sum(-1, keepdim=True)
    shared = total + 2 * unit * cross + square * (square * variance).sum(-1, keepdim=True)
    found = variance * (1 - 2 * (1 + square) / width) + shared / width**2
    return _scaled(found, scale, gain)


def rms_norm_variance(mean: Tensor, variance: Tensor, gain: Tensor | None, eps: float) -> Tensor:
    """Return [..., D] variances of RMSNorm over the last dimension."""
    width = mean.shape[-1]
    scale = (mean.square().mean(-1, keepdim=True) + eps).rsqrt()
    square = (mean * scale).square()
    shared = square * (square * variance).sum(-1, keepdim=True)
    found = variance * (1 - 2 * square / width) + shared / width**2
    return _scaled(found, scale, gain)


def _scaled(found: Tensor, scale: Tensor, gain: Tensor | None) -> Tensor:
    rate = scale if gain is None else scale * gain.to(scale.dtype)
    return (found * rate.square()).clamp_min(0)


def gain_of(norm: torch.nn.Module, eps: float, like: Tensor) -> Tensor:
    """Return the gain [D] of an RMSNorm of a model family, from its output for a vector of ones.

    Families store the gain in different ways (Gemma adds 1 to its weight), and RMSNorm of ones is g / sqrt(1 + eps).
    """
    ones = torch.ones(1, like.shape[-1], dtype=like.dtype, device=like.device)
    found: Tensor = type(norm).forward(norm, ones)[0]
    return found * (1 + eps) ** 0.5  # type: ignore[no-any-return]


def eps_of(norm: Any) -> float:
    """Return the eps of an RMSNorm of a model family; families store it under two names."""
    eps: Any = getattr(norm, "variance_epsilon", None) or getattr(norm, "eps", 0.0)
    return float(eps)
