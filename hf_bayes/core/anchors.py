"""The gradient at anchors: further points, beside theta, at which an update needs it (``Rule.anchor``)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def at_each_point(anchor: Tensor, gradient: Callable[[Tensor], Tensor | None]) -> Tensor:
    """Return the gradients at ``anchor`` in its shape: [M, d], or [M, J, d] for J points of each chain.

    ``gradient`` is called once for each of the J points, with the points [M, d] of all chains.
    """
    found = []
    for point in (anchor,) if anchor.ndim == 2 else anchor.unbind(1):
        value = gradient(point.contiguous())
        assert value is not None
        found.append(value)
    return found[0] if anchor.ndim == 2 else torch.stack(found, 1)
