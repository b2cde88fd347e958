"""The gradient at the points beside theta at which an update needs it, too (``Rule.anchor``)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def at_each_point(anchor: Tensor, gradient: Callable[[Tensor], Tensor | None]) -> Tensor:
    """Return the gradients, of the same shape, at points [M, d] or [M, J, d]: one point of each chain at a time."""
    found = []
    for point in (anchor,) if anchor.ndim == 2 else anchor.unbind(1):
        value = gradient(point.contiguous())
        assert value is not None
        found.append(value)
    return found[0] if anchor.ndim == 2 else torch.stack(found, 1)
