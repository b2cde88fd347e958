"""The gradient at the points beside theta at which an update needs it, too (``Rule.anchor``)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def at_each_point(anchor: Tensor, gradient: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the gradients, of the same shape, at points [M, d] or [M, J, d]: one point of each chain at a time."""
    if anchor.ndim == 2:
        return gradient(anchor)
    return torch.stack([gradient(point.contiguous()) for point in anchor.unbind(1)], 1)
