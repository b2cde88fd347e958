"""The scales of parameters that a chain learns in windows of its burn-in, for every method that adapts some.

A scale is the standard deviation of the chain's positions in a window. At the end of a window it replaces the last one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Place(NamedTuple):
    """The place of an update among windows.

    Attributes:
        since: updates since scales last changed, or since the start.
        position: the number of the update's position in its window, from 1; 0 outside of all windows.
    """

    since: int
    position: int


def place_of(done: int, windows: tuple[int, ...]) -> Place:
    """Return the place of update ``done`` (from 1) among windows, given by their edges."""
    since = done - max((edge for edge in windows[1:] if edge < done), default=0)
    if not windows or not windows[0] < done <= windows[-1]:
        return Place(since, 0)
    return Place(since, done - max(edge for edge in windows if edge < done))


def add_position(theta: Tensor, mean: Tensor, squares: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return mean and sum of squared deviations [M, d] with position number ``count``, by Welford's recursion."""
    if count == 1:
        mean, squares = torch.zeros_like(mean), torch.zeros_like(squares)
    deviation = theta - mean
    mean = mean + deviation / count
    return mean, squares + deviation * (theta - mean)


def scales_of(squares: Tensor, count: int, *, weight: int, before: Tensor) -> Tensor:
    """Return the standard deviations [M, d] of a window, their logarithms shrunk towards the mean logarithm.

    Args:
        squares: [M, d] sum of the squared deviations of ``count`` positions.
        weight: the number of positions that the mean logarithm counts for.
        before: [M, d], which a chain keeps that did not move.
    """
    total = squares.mean(1, keepdim=True)
    # a coordinate that did not move because of rounding gets the smallest scale that the other coordinates allow
    least = total.clamp_min(torch.finfo(total.dtype).tiny) * torch.finfo(total.dtype).eps
    logs = 0.5 * (squares.maximum(least) / count).log()
    logs = (count * logs + weight * logs.mean(1, keepdim=True)) / (count + weight)
    return torch.where(total > 0, logs.exp(), before)
