"""LayerNorm and RMSNorm of a Gaussian that may be as wide as its mean: columns and mean with the expected scale.

Let y = x / s with s^2 = mean_i x_i^2 + eps, for x ~ N(m, V) of D units; LayerNorm subtracts the mean of the units
first, and the gain multiplies y. The derivative at m grows as 1 / |m|, so a small hidden state seems to have an outcome
far wider than a norm can have. The derivative J at x gives the bound Cov y <= E[J V J'] (the Poincare inequality of
Gaussians). So the columns are dy = r (dx - n mean(n dx)) with n = r m and

    r^2 = E[1 / s^2] = (1 + c) / E[s^2],    c = Var[s^2] / E[s^2]^2,

to second order in s^2 - E[s^2], where

    E[s^2] = mean_i (m_i^2 + V_ii) + eps,    Var[s^2] = (4 m' V m + 2 tr V^2) / D^2.

The mean, to the same order, is (Stein's lemma)

    E y = m E[1 / s] - V m E[1 / s^3] / D,
    E[1 / s] = (1 + 3 c / 8) / E[s^2]^(1/2),    E[1 / s^3] = (1 + 15 c / 8) / E[s^2]^(3/2).

Mean and noise shrink together: |y|^2 = D (1 - eps / s^2) in every draw. So the total variance follows from the mean,

    tr Cov y = D (1 - eps E[1 / s^2]) - |E y|^2,

and the columns are scaled to have it. For a narrow x they are the derivatives at m. If the mean kept its size, the next
norm would find |E y|^2 + tr Cov y > D and divide by it once more: behind four blocks of a BERT, variances were .4 of
the true ones.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hf_bayes.uncertainty.likelihoods import widened

LEAST = 0.5
"""The least share of the bound that the total variance has. Expansions to second order give .65 and more where they
hold; this keeps the variance of a very wide input positive."""


class Size(NamedTuple):
    """The moments of s^2 and of x along its mean, all [..., 1] but the last two.

    Attributes:
        square: mean_i m_i^2.
        noise: mean_i V_ii.
        second: E[s^2].
        relative: c.
        along: [S, ..., 1] F_s . m.
        towards: [..., D] V m / D.
    """

    square: Tensor
    noise: Tensor
    second: Tensor
    relative: Tensor
    along: Tensor
    towards: Tensor


def norm_columns(
    mean: Tensor, moved: Tensor, gain: Tensor | None, eps: float, *, centred: bool, shared: int = 0
) -> Tensor:
    """Return columns and drift [S + 1, ..., D] behind a norm over the last dimension.

    Args:
        mean: [..., D] the mean of x without its drift.
        moved: [S + 1, ..., D], a root of V, and the drift d in the last row: m is the sum of mean and d.
        gain: [D]; None is 1.
        eps: the constant in s.
        centred: True for LayerNorm, False for RMSNorm.
        shared: the number of columns, the first ones, that are no draws.
    """
    if centred:
        mean, moved = mean - mean.mean(-1, keepdim=True), moved - moved.mean(-1, keepdim=True)
    plain, expected = widened(mean), widened(mean + moved[-1])
    size = size_of(expected, moved[:-1], eps, shared)
    rate = ((1 + size.relative) / size.second).sqrt()
    unit = (expected * rate).to(moved.dtype)
    found = moved.addcmul(unit, torch.linalg.vecdot(moved, unit)[..., None] / mean.shape[-1], value=-1)
    bound = rate.square() * widened(found[:-1]).square().sum((0, -1))[..., None]
    share = (total_variance(size, eps, mean.shape[-1]) / bound).nan_to_num(1.0).clamp(LEAST, 1.0)
    found *= (rate * share.sqrt()).to(moved.dtype)
    found[-1] = mean_behind(expected, size) - plain * (plain.square().mean(-1, keepdim=True) + eps).rsqrt()
    return found if gain is None else found.mul_(gain.to(found.dtype))


def mean_behind(mean: Tensor, size: Size) -> Tensor:
    """Return [..., D] E y for the mean m [..., D]."""
    first, third = _reciprocals(size)
    return mean * first - size.towards * third


def total_variance(size: Size, eps: float, width: int) -> Tensor:
    """Return [..., 1] tr Cov y, with |E y|^2 multiplied out, so that no difference of numbers near D remains."""
    first, third = _reciprocals(size)
    c = size.relative
    radial = size.noise - eps * c - size.square * (3 / 4 * c + 9 / 64 * c.square())
    crossed = 2 * first * third * size.along.square().sum(0) / width
    return width * radial / size.second + crossed - third.square() * size.towards.square().sum(-1, keepdim=True)


def size_of(mean: Tensor, columns: Tensor, eps: float, shared: int = 0) -> Size:
    """Return the moments for a mean [..., D] and columns [S, ..., D], of which the first ``shared`` are no draws."""
    columns, width = widened(columns), mean.shape[-1]
    square, noise = mean.square().mean(-1, keepdim=True), columns.square().sum((0, -1))[..., None] / width
    along = torch.linalg.vecdot(columns, mean)[..., None]
    second = square + noise + eps
    trace = trace_of_square(columns, shared)[..., None]
    relative = (4 * along.square().sum(0) + 2 * trace) / (width * second).square()
    return Size(square, noise, second, relative, along, (columns * along).sum(0) / width)


def trace_of_square(columns: Tensor, shared: int = 0) -> Tensor:
    """Return [...] tr V^2 for columns [S, ..., D], by the smaller of the two products of the columns.

    With n draws, the trace of the square of F F' is (tr V)^2 / n too large in expectation, by the lengths of the draws.
    So pairs of different draws stand for all pairs.
    """
    if len(columns) > columns.shape[-1]:  # and so the bias is small
        return torch.einsum("s...d,s...e->...de", columns, columns).square().sum((-2, -1))
    squares = torch.einsum("s...d,t...d->...st", columns, columns).square()
    count = len(columns) - shared
    if count < 2:
        return squares.sum((-2, -1))
    own = squares[..., shared:, shared:]
    pairs = own.sum((-2, -1)) - own.diagonal(dim1=-2, dim2=-1).sum(-1)
    return squares.sum((-2, -1)) - own.sum((-2, -1)) + pairs * (count / (count - 1))


def _reciprocals(size: Size) -> tuple[Tensor, Tensor]:
    """Return E[1 / s] and E[1 / s^3]."""
    c, second = size.relative, size.second
    return second.rsqrt() * (1 + 3 / 8 * c), second.pow(-1.5) * (1 + 15 / 8 * c)
