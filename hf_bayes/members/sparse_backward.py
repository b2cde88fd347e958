"""Linear layers whose backward pass leaves out positions without a gradient.

A classifier reads one position. So the gradient of its outputs is zero at all other positions behind the attention of
the last block, and autograd would multiply these zeros by the weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_bayes.members.engine import Members

SHARE = 0.5
"""Above this share of positions with a gradient, all positions are multiplied: to choose rows is a copy."""

FIRST = 8
"""The number of columns that are read first. If they show enough positions with a gradient, the others are not read."""


@contextmanager
def skipping_zeros(members: Members) -> Iterator[None]:
    """Within the block, linear layers have gradients in their inputs alone, and leave out positions without gradient.

    Their outputs are the same bit for bit. Layers with a forward of their own are left unchanged.
    """
    members.blocked.remove()  # its forwards are for few rows without gradients
    replaced = [m for m in members.model.modules() if type(m) is nn.Linear and "forward" not in vars(m)]
    for module in replaced:
        module.forward = _forward_of(module)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for module in replaced:
            del module.forward
        members.blocked.install()


def rows_with_gradient(g: Tensor) -> Tensor:
    """Return [...] bool, True where g [..., out] is not zero."""
    found = g[..., :FIRST].ne(0).any(-1)
    return found if bool(found.all()) else g.ne(0).any(-1)


def product(g: Tensor, weight: Tensor) -> Tensor:
    """Return g W [..., in] for g [..., out] and W [out, in], from the rows of g that are not zero."""
    rows = g.reshape(-1, g.shape[-1])
    found = rows[:, :FIRST].ne(0).any(1)
    if int(found.sum()) <= SHARE * len(rows):
        found = rows.ne(0).any(1)
        if int(found.sum()) <= SHARE * len(rows):
            whole = rows.new_zeros(len(rows), weight.shape[1])
            whole[found] = rows[found] @ weight
            return whole.view(*g.shape[:-1], -1)
    return g @ weight


def _forward_of(module: nn.Linear) -> Any:
    apply: Any = _Linear.apply

    def forward(x: Tensor) -> Tensor:
        if not (torch.is_grad_enabled() and x.requires_grad):
            return F.linear(x, module.weight, module.bias)
        found: Tensor = apply(x, module.weight, module.bias)
        return found

    return forward


class _Linear(torch.autograd.Function):
    """The linear map, with the backward pass of ``product``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.dtype = x.dtype
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        (weight,) = ctx.saved_tensors
        return product(g, weight.to(g.dtype)).to(ctx.dtype), None, None
