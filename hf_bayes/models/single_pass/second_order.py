"""Columns behind functions of a wide Gaussian, and the drift of the mean.

The rules take the columns F of a root of V and the drift d of the mean together, [S + 1, ...] with d in the last row
(``tangents``). x ~ N(m + d, V) is expanded at its own mean. The drift behind f is

    E f(x) - f(m) = f(m + d) - f(m) + sum_s f''(m + d)[F_s, F_s] / 2 + ...,

where f'' is the second derivative along a column. It is 0 where columns and drift are 0. Attention is read at draws in
place of the second derivative, which is too large where scores are wide (``attention_shift``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from hf_bayes.models.single_pass.activations import derivative
from hf_bayes.uncertainty.likelihoods import widened

_NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(7)
HERMITE = tuple(_NODES.tolist()), tuple((_WEIGHTS / _WEIGHTS.sum()).tolist())
"""Nodes and weights for the expectation over a standard normal number, exact for polynomials up to degree 13."""

NARROW = 1e-3
"""The standard deviation, relative to 1 + |m|, from which on variances come from differences of values. In float32
their relative error is below 1e-3 there, and so is the second order that the slope leaves out."""

LEADING_STEP = 3**0.5
"""The step along a column that is no draw: the outer one of three nodes of Gauss and Hermite."""

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
    # in one order in memory: elsewhere torch rounds activations in another way, and without noise a drift would remain
    here = function(widened(mean).contiguous())
    expected = widened(mean + moved[-1]).contiguous()
    std = widened(moved[:-1]).square().sum(0).sqrt().contiguous()
    drift, square, along = (torch.zeros_like(std) for _ in range(3))
    for node, weight in zip(*HERMITE, strict=True):
        change = function(expected + node * std) - here
        drift, square = drift + weight * change, square + weight * change.square()
        along = along + weight * node * change
    wide = std > NARROW * (1 + expected.abs())
    root = (square - drift.square()).clamp_min(0).sqrt().copysign(along)
    found = moved * torch.where(wide, root / std, derivative(function, expected)).to(moved.dtype)
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
    weights_of: Callable[[Tensor, Tensor], Tensor], scale: float, query: Pair, key: Pair, value: Pair, shared: int = 0
) -> Tensor:
    """Return columns and drift [S + 1, B, H, T, n] of softmax(scale q k') v.

    A column is the derivative a dv + (a (ds - a . ds)) v with ds = scale (dq k' + q dk').

    Args:
        weights_of: q [B, H, T, d] and k [B, H, S, d] -> the weights a [B, H, T, S].
        scale: the factor of scores.
        query, key, value: at least one with columns.
        shared: the number of columns, the first ones, that are no draws.
    """
    # the means by the same sums, so that their order in memory, and with it all rounding, is that of ``here``
    q, k, v = (_at_drift(pair, 0)[0] for pair in (query, key, value))
    before = weights_of(q, k) @ v
    (q, dq), (k, dk), (v, dv) = pairs = [_at_drift(pair) for pair in (query, key, value)]
    weights = weights_of(q, k)
    here = weights @ v
    count = next(len(columns) for _, columns in pairs if columns is not None)
    found = torch.empty((count + 1, *here.shape), dtype=here.dtype, device=here.device)
    found[-1] = here - before
    for index in range(count):  # one column at a time: each has scores [B, H, T, S] of its own
        noise = None if dv is None else dv[index]
        column = torch.zeros_like(before) if noise is None else weights @ noise
        if dq is not None or dk is not None:
            along: Tensor | float = 0.0 if dq is None else dq[index] @ k.mT
            scores = scale * (along if dk is None else along + q @ dk[index].mT)
            part = weights * scores
            column = column + (part - weights * part.sum(-1, keepdim=True)) @ v
            step = LEADING_STEP if index < shared else float(count - shared) ** 0.5
            found[-1] += attention_shift(weights_of, here, pairs, index, step)
        found[index] = column
    return found


def attention_shift(
    weights_of: Callable[[Tensor, Tensor], Tensor], here: Tensor, pairs: Sequence[Pair], index: int, step: float
) -> Tensor:
    """Return [f(x + h c) + f(x - h c) - 2 f(x)] / (2 h^2), the part of the drift of attention f along a column c.

    For h -> 0 it is f''[c, c] / 2. A column of S draws is a draw over sqrt(S): with h = sqrt(S), f is read at the draw
    and at its mirror image, and the sum over columns is an estimate of E f(x) - f(x) in all orders. The second
    derivative grows with the square of the scores' noise. The weights are between 0 and 1 in every draw, so that it
    misses the mean by more than the mean weights do, once scores have a standard deviation near 1.

    Args:
        weights_of: as of ``attention_columns``.
        here: [..., T, n] f(x).
        pairs: queries, keys and values at the expansion point, with their columns or None.
        index: the index of the column.
        step: h.
    """
    total = -2 * here
    for size in (step, -step):
        q, k, v = (x if columns is None else x + size * columns[index] for x, columns in pairs)
        total = total + weights_of(q, k) @ v
    return total / (2 * step**2)


def _at_drift(pair: Pair, times: int = 1) -> Pair:
    """Return mean + times drift and the columns, of a mean and its columns with the drift below them."""
    mean, moved = pair
    return (mean, None) if moved is None else (torch.add(mean, moved[-1], alpha=times), moved[:-1])
