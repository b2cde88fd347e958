"""The optimisers of a free energy: AdamW without weight decay, and SGD with momentum.

A prior is a part of the free energy, so there is no weight decay, and AdamW is Adam (Kingma and Ba 2015, Algorithm 1).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

OptimiserName = Literal["adamw", "sgd"]

BETA2, EPSILON = 0.999, 1e-8
"""The constants of Adam, beside its beta_1."""

Direction = Callable[[Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor, Tensor]]
"""(gradient, first moment, second moment, number of the update from 1) -> (first, second, divisor): the step is minus
the step size times first / divisor."""


def direction(optimizer: OptimiserName, momentum: float) -> Direction:
    """Return the optimiser of this name, with ``momentum`` as AdamW's beta_1 or SGD's beta."""

    def adamw(gradient: Tensor, first: Tensor, second: Tensor, step: int) -> tuple[Tensor, Tensor, Tensor]:
        return adam(gradient, first, second, step, momentum=momentum)

    def sgd(gradient: Tensor, first: Tensor, second: Tensor, step: int) -> tuple[Tensor, Tensor, Tensor]:
        return momentum * first + gradient, second, torch.ones_like(second)

    return adamw if optimizer == "adamw" else sgd


def adam(
    gradient: Tensor, first: Tensor, second: Tensor, step: int, *, momentum: float = 0.9
) -> tuple[Tensor, Tensor, Tensor]:
    """Return Adam's two moments after update number ``step``, and the divisor of the first one in Adam's direction."""
    first = torch.lerp(first, gradient, 1 - momentum)
    second = (BETA2 * second).addcmul_(gradient, gradient, value=1 - BETA2)
    of_first, of_second = 1 - momentum**step, 1 - BETA2**step
    return first, second, second.sqrt().mul_(of_first / math.sqrt(of_second)).add_(of_first * EPSILON)
