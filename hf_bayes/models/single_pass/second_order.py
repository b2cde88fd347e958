"""The mean of a function of a Gaussian to second order in its noise: what is added to the function at the mean.

For x ~ N(m, V) with the columns F of a root of V, E f(x) = f(m) + sum_s f''(m)[F_s, F_s] / 2 + ..., where f'' is the
second derivative along a column. All shifts are 0 where the columns are 0.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hf_bayes.uncertainty.likelihoods import widened


def element_shift(function: Callable[[Tensor], Tensor], mean: Tensor, columns: Tensor) -> Tensor:
    """Return g''(m) V / 2 of an elementwise function g, for a mean [...] and columns [S, ...]."""

    def slopes(value: Tensor) -> Tensor:
        found: Tensor = torch.func.grad(lambda x: function(x).sum())(value)
        return found

    # twice in reverse mode: the derivative of SiLU has no forward mode
    with torch.inference_mode(False), torch.no_grad():
        bend: Tensor = torch.func.grad(lambda x: slopes(x).sum())(mean.detach().clone())
    return bend * columns.square().sum(0) / 2


def norm_shift(mean: Tensor, columns: Tensor, gain: Tensor | None, eps: float, *, centred: bool) -> Tensor:
    """Return the shift of a LayerNorm (``centred``) or an RMSNorm over the last dimension.

    With the notation of ``wide_norms``, E[x / s] = m E[1 / s] - V m E[1 / s^3] / D (Stein's lemma), where to second
    order in s^2 - E[s^2]

        E[1 / s] = (1 + 3 c / 8) / E[s^2]^(1/2),    E[1 / s^3] = (1 + 15 c / 8) / E[s^2]^(3/2).

    Unlike a derivative at m, these expectations have a bound if m is near 0.
    """
    if centred:
        mean, columns = mean - mean.mean(-1, keepdim=True), columns - columns.mean(-1, keepdim=True)
    mean, columns, width = widened(mean), widened(columns), mean.shape[-1]
    along = torch.linalg.vecdot(columns, mean)[..., None]
    square = mean.square().mean(-1, keepdim=True)
    second = square + columns.square().sum((0, -1))[..., None] / width + eps
    pairs = "s...d,t...d->...st" if len(columns) <= width else "s...d,s...e->...de"
    trace = torch.einsum(pairs, columns, columns).square().sum((-2, -1))[..., None]
    relative = (4 * along.square().sum(0) + 2 * trace) / (width * second).square()
    rate = second.rsqrt() * (1 + 3 / 8 * relative) - (square + eps).rsqrt()
    found = mean * rate - (columns * along).sum(0) / width * second.pow(-1.5) * (1 + 15 / 8 * relative)
    return found if gain is None else found * gain


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
