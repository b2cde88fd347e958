"""A trial of the Laplace approximation before a chain starts: for the start itself, and for a control variate.

Some minibatches are evaluated at two points each: theta_0, and theta_1 = theta_0 + sqrt(T) S v with v ~ N(0, I), a draw
of the Laplace approximation. Their gradients g_0 and g_1 of U in whitened coordinates (``whitening``) give, in the
directions where the data outweigh the prior,

    V_0, V_1    the variance of an element of g_0 and of g_1 over minibatches
    V_d         the variance of an element of g_1 - g_0: what remains with a control variate at theta_0
    slope       v'(g_1 - g_0) / (sqrt(T) |v|^2)         1 if U is the quadratic that S was made of

* The approximation *fits* if the slope is between 1 / ``MAX_MISFIT`` and ``MAX_MISFIT``, and V_1 is at most
  ``MAX_NOISE`` times V_0. Then the chain starts at theta_1, where its gradients are as noisy as in equilibrium.
  Otherwise it starts at theta_0.
* A *control variate* takes two gradients for an update: g(theta) - g(theta_0) on a minibatch, plus the gradient of all
  rows at theta_0, which is computed once. It changes the noise of a gradient and not its mean, so the target is the
  same. The relaxation is proportional to V. So where the approximation fits it pays if c V_d < V_1, with c the factor
  by which it raises the number of gradients: 2 to 3, with the pass over all rows.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

MAX_MISFIT = 2.0
"""The largest factor between the slope along a draw and the slope of the quadratic."""

MAX_NOISE = 4.0
"""The largest V_1 / V_0 at a draw of an approximation that fits. It was 1.1 to 1.7 on last layers over normalised
features, up to 6 on last layers with few rows and a wide prior, and 35 to 40 with LoRA in an encoder's last block."""

ROUNDING = 1e-9


class Trial(NamedTuple):
    """Sums over the minibatches so far; V_0, V_1 and V_d in this order.

    Attributes:
        previous: [M, 2, d] g_0 and g_1 of the first minibatch of a pair; [M, 2, 1] zeros while there is none.
        squares: [M, 3] sums over pairs of minibatches, each an estimate of V.
        slope: [M] the sum of slopes.
        num_taken: [M] int64, minibatches.
    """

    previous: Tensor
    squares: Tensor
    slope: Tensor
    num_taken: Tensor


class Choice(NamedTuple):
    """The choices of each chain [M].

    Attributes:
        fits: start at the draw.
        anchored: use the control variate.
        variance: V of the gradient that the chain will use.
        at_start, at_draw, beside, slope: V_0, V_1, V_d and the slope.
    """

    fits: Tensor
    anchored: Tensor
    variance: Tensor
    at_start: Tensor
    at_draw: Tensor
    beside: Tensor
    slope: Tensor

    @property
    def without_anchor(self) -> Tensor:
        """V without a control variate, where the chain starts."""
        return torch.where(self.fits, self.at_draw, self.at_start)


def begin(theta: Tensor) -> Trial:
    """Return the trial before its first minibatch."""
    rows = len(theta)
    count = torch.zeros(rows, dtype=torch.int64, device=theta.device)
    return Trial(theta.new_zeros(rows, 2, 1), theta.new_zeros(rows, 3), theta.new_zeros(rows), count)


def take(trial: Trial, gradients: tuple[Tensor, Tensor], direction: Tensor, informed: Tensor) -> Trial:
    """Return the trial after one more minibatch.

    It takes little memory beside the gradients: as many numbers as theta has, or three times as many of one chain.

    Args:
        gradients: g_0 and g_1, [M, d] each.
        direction: [M, d] sqrt(T) v.
        informed: [M, d] True in directions where the data outweigh the prior.
    """
    count, squares = trial.num_taken + 1, trial.squares
    at_start, at_draw = gradients
    slope = trial.slope + _masked((at_draw - at_start).mul_(direction), informed).sum(1) / _masked(
        direction.square(), informed
    ).sum(1)
    if int(count[0]) % 2 == 1:  # all chains have done the same number of updates
        return Trial(torch.stack(gradients, 1), squares, slope, count)
    pairs = torch.stack(
        [_half_squares(*of_chain) for of_chain in zip(*gradients, trial.previous, informed, strict=True)]
    )
    squares = squares + pairs / informed.sum(1, keepdim=True)
    return Trial(torch.zeros_like(trial.previous[:, :, :1]), squares, slope, count)


def _half_squares(at_start: Tensor, at_draw: Tensor, previous: Tensor, informed: Tensor) -> Tensor:
    """Return the sums [3] of half the squares of the changes of g_0, g_1 and g_1 - g_0 of a chain, where informed."""
    changes = at_start.new_empty(3, len(at_start))
    torch.sub(at_start, previous[0], out=changes[0])
    torch.sub(at_draw, previous[1], out=changes[1])
    torch.sub(changes[1], changes[0], out=changes[2])
    return changes.square_().div_(2).mul_(informed).sum(1)


def _masked(values: Tensor, informed: Tensor) -> Tensor:
    """Return values [M, d] times ``informed``, in place; a chain at a time, as the factors are made floats first."""
    for of_chain, mask in zip(values, informed, strict=True):
        of_chain.mul_(mask)
    return values


def cost_of_anchor(num_updates: int, update_fraction: float | None) -> float:
    """Return the factor by which a control variate raises the number of gradients, its pass over all rows included.

    It is infinite if the pass takes more gradients than the updates: a short run does not read all of a large data set.

    Args:
        num_updates: the updates after the trial.
        update_fraction: the share of the data's rows in one update; if it is None, the pass is not counted.
    """
    share = 0.0 if update_fraction is None else 1 / (update_fraction * num_updates)
    return 2.0 + share if share <= 1 + ROUNDING else math.inf


def choose(trial: Trial, least: float, cost: float) -> Choice:
    """Return the choices after the last minibatch.

    Args:
        least: V below which the step size does not grow any more.
        cost: the result of ``cost_of_anchor``.
    """
    at_start, at_draw, beside = (trial.squares / (trial.num_taken // 2)[:, None]).clamp_min(least).unbind(1)
    slope = trial.slope / trial.num_taken
    fits = (slope > 1 / MAX_MISFIT) & (slope < MAX_MISFIT) & (at_draw <= MAX_NOISE * at_start)
    anchored = fits & (cost * beside < at_draw)
    choice = Choice(fits, anchored, beside, at_start, at_draw, beside, slope)
    return choice._replace(variance=torch.where(anchored, beside, choice.without_anchor))


def without_anchor(choice: Choice) -> Choice:
    """Return the choices where the gradient of all rows is not available."""
    return choice._replace(anchored=torch.zeros_like(choice.anchored), variance=choice.without_anchor)
