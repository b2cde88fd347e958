"""Columns behind functions of a wide Gaussian, and the drift of the mean to second order in the noise.

The rules take the columns F of a root of V and the drift d of the mean together, [S + 1, ...] with d in the last row
(``tangents``). x ~ N(m + d, V) is expanded at its own mean. The drift behind f is

    E f(x) - f(m) = f(m + d) - f(m) + sum_s f''(m + d)[F_s, F_s] / 2 + ...,

where f'' is the second derivative along a column. It is 0 where columns and drift are 0.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from hf_bayes.models.single_pass.activations import slope
from hf_bayes.uncertainty.likelihoods import widened

_NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(7)
HERMITE = tuple(_NODES.tolist()), tuple((_WEIGHTS / _WEIGHTS.sum()).tolist())
"""Nodes and weights for the expectation over a standard normal number, exact for polynomials up to degree 13."""

NARROW = 1e-3
"""The standard deviation, relative to 1 + |m|, from which on variances come from differences of values. In float32
their relative error is below 1e-3 there, and so is the second order that the slope leaves out."""

Pair = tuple[Tensor, Tensor | None]
"""A mean, with its columns and drift or None."""


def with_drift(columns: Tensor, drift: Tensor | None = None) -> Tensor:
    """Return [S + 1, ...], the columns [S, ...] and the drift [...] below them; None is no drift."""
    return torch.cat([columns, torch.zeros_like(columns[:1]) if drift is None else drift[None]])


def element_columns(function: Callable[[Tensor], Tensor], mean: Tensor, moved: Tensor) -> Tensor:
    """Return columns and drift [S + 1, ...] behind an elementwise function g, for a mean [...].

    Each number x ~ N(m, v) gets the mean and the variance of g(x), by the nodes of Gauss and Hermite: the columns are
    multiplied by the root of Var g(x) / v, with the sign of E g'(x) = Cov(x, g(x)) / v. The slope at m alone would
    give a wide tanh a variance above its bound. Narrow numbers take the slope: differences of g would be rounding.
    """
    expected, std = widened(mean + moved[-1]), widened(moved[:-1]).square().sum(0).sqrt()
    here = function(widened(mean))
    drift, square, along = (torch.zeros_like(std) for _ in range(3))
    for node, weight in zip(*HERMITE, strict=True):
        change = function(expected + node * std) - here
        drift, square = drift + weight * change, square + weight * change.square()
        along = along + weight * node * change
    wide = std > NARROW * (1 + expected.abs())
    root = (square - drift.square()).clamp_min(0).sqrt().copysign(along)
    found = moved * torch.where(wide, root / std, slope(function, expected)).to(moved.dtype)
    found[-1] = drift
    return found


def product_columns(x: Tensor, dx: Tensor, y: Tensor, dy: Tensor) -> Tensor:
    """Return columns and drift [S + 1, ...] of x y, whose factors are [...] with dx and dy [S + 1, ...].

    The product of the noises is left out of the columns. Its tails grow from gate to gate, which no member does, since
    norms bound them: with the product, the last feed-forward layer of a small Mistral had 5 times the true variance.
    """
    found = (dx * (y + dy[-1])).addcmul_(dy, x + dx[-1])
    found[-1] += (dx[:-1] * dy[:-1]).sum(0) - dx[-1] * dy[-1]
    return found


def attention_columns(
    weights_of: Callable[[Tensor, Tensor], Tensor], scale: float, query: Pair, key: Pair, value: Pair
) -> Tensor:
    """Return columns and drift [S + 1, B, H, T, n] of softmax(scale q k') v.

    A column is a dv + (a (ds - a . ds)) v with ds = scale (dq k' + q dk').

    Args:
        weights_of: q [B, H, T, d] and k [B, H, S, d] -> the weights a [B, H, T, S].
        scale: the factor of scores.
        query, key, value: at least one with columns.
    """
    (q, dq), (k, dk), (v, dv) = query, key, value
    before = weights_of(q, k) @ v
    q, k, v = (mean if moved is None else mean + moved[-1] for mean, moved in (query, key, value))
    weights = weights_of(q, k)
    found: list[Tensor] = []
    drift = weights @ v - before
    count = next(len(moved) for moved in (dq, dk, dv) if moved is not None) - 1
    for index in range(count):  # one column at a time: each has scores [B, H, T, S] of its own
        noise = None if dv is None else dv[index]
        column = torch.zeros_like(before) if noise is None else weights @ noise
        if dq is not None or dk is not None:
            along: Tensor | float = 0.0 if dq is None else dq[index] @ k.mT
            scores = scale * (along if dk is None else along + q @ dk[index].mT)
            part = weights * scores
            column = column + (part - weights * part.sum(-1, keepdim=True)) @ v
            pairs = 0.0 if dq is None or dk is None else scale * (dq[index] @ dk[index].mT)
            drift = drift + attention_shift(weights, scores, pairs, v, noise)
        found.append(column)
    return torch.stack([*found, drift])


def attention_shift(
    weights: Tensor, scores: Tensor, pairs: Tensor | float, value: Tensor, noise: Tensor | None
) -> Tensor:
    """Return the part of softmax(s) v that is of second order along one column.

    With e = ds - a . ds, da = a e, and d2a = a (e^2 - a . e^2), it is

        (d2a / 2 + a (p - a . p)) v + da dv.

    Args:
        weights: [..., T, S] a.
        scores: [..., T, S] ds, the derivative of the scores.
        pairs: [..., T, S] p, half their second derivative.
        value: [..., S, n] v.
        noise: [..., S, n] dv; None if it has none.
    """
    centred = scores - (weights * scores).sum(-1, keepdim=True)
    half = centred.square() / 2 + pairs
    found = weights * (half - (weights * half).sum(-1, keepdim=True)) @ value
    return found if noise is None else found + (weights * centred) @ noise
