"""Linear layers whose backward pass leaves out positions without a gradient.

A classifier reads one position. So the gradient of its outputs is zero at all other positions behind the attention of
the last block, and autograd would multiply these zeros by the weights.

LoRA's factor A has the input of its layer. The gradients of the two in this input are summed where they are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners.lora.layer import LoraLayer
from torch import Tensor, nn

from hf_bayes.members.engine import Members

SHARE = 0.5
"""Above this share of positions with a gradient, all positions are multiplied: to choose rows is a copy."""

FIRST = 8
"""The number of columns that are read first. If they show enough positions with a gradient, the others are not read."""

FEW_COLUMNS = 16
"""With fewer columns, a product is transposed: on a CPU with AVX2, MKL takes three times as long for 8 columns as for 8
rows."""


@contextmanager
def skipping_zeros(members: Members) -> Iterator[None]:
    """Within the block, linear layers have gradients in their inputs alone, and leave out positions without gradient.

    Their outputs are the same bit for bit. Layers with a forward of their own are left unchanged.
    """
    members.blocked.remove()  # its forwards are for few rows without gradients
    modules = list(members.model.modules())
    replaced: list[Any] = [m for m in modules if type(m) is nn.Linear and "forward" not in vars(m)]
    for module in replaced:
        module.forward = _Forward(module)
    for module in modules:
        if isinstance(module, LoraLayer):
            _join(module)
    try:
        yield
    finally:
        for module in replaced:
            del module.forward
        members.blocked.install()


def rows_with_gradient(g: Tensor) -> Tensor:
    """Return [...] bool, True where g [..., out] is not zero."""
    found = g[..., :FIRST].ne(0).any(-1)
    return found if bool(found.all()) else g.abs().amax(-1).ne(0)  # takes a fifth of the time of ``g.ne(0).any(-1)``


def product(g: Tensor, weight: Tensor, *others: tuple[Tensor, Tensor]) -> Tensor:
    """Return g W + sum_i g_i W_i [..., in] for g [..., out] and W [out, in], from the rows that are not zero.

    Args:
        g, weight: g and W.
        others: (g_i [..., out_i], W_i [out_i, in]) of narrow matrices.
    """
    terms = [(own.reshape(-1, own.shape[-1]), factor) for own, factor in ((g, weight), *others)]
    rows = terms[0][0]
    first = rows[:, :FIRST]
    if int(first.count_nonzero()) <= SHARE * first.numel():  # with more, more than this share of rows is not zero
        found = torch.stack([rows_with_gradient(own) for own, _ in terms]).any(0)
        if int(found.sum()) <= SHARE * len(rows):
            whole = rows.new_zeros(len(rows), weight.shape[1])
            whole[found] = _sum([(own[found], factor) for own, factor in terms])
            return whole.view(*g.shape[:-1], -1)
    return _sum(terms).view(*g.shape[:-1], -1)


def _sum(terms: list[tuple[Tensor, Tensor]]) -> Tensor:
    (first, weight), *others = terms
    total = first @ weight if weight.shape[1] >= FEW_COLUMNS else (weight.mT @ first.mT).mT
    for g, factor in others:
        total.addmm_(g, factor)
    return total


def _join(layer: LoraLayer) -> None:
    """Let a layer compute the outputs of its active factors A together with its own."""
    base: Any = getattr(layer.base_layer, "forward", None)
    if not isinstance(base, _Forward) or layer.disable_adapters or layer.merged:
        return
    factors: list[Any] = [layer.lora_A[name].forward for name in layer.active_adapters if name in layer.lora_A]
    dtype = base.module.weight.dtype
    base.joined = [
        own
        for own in factors
        if isinstance(own, _Forward) and own.module.bias is None and own.module.weight.dtype == dtype
    ]


class _Forward:
    """The forward of a linear layer, with the backward pass of ``product``.

    Attributes:
        module: the layer.
        joined: the forwards of layers without bias that will be called with the same input.
        known: the input and the output, if another layer has computed it.
    """

    def __init__(self, module: nn.Linear) -> None:
        self.module = module
        self.joined: list[_Forward] = []
        self.known: tuple[Tensor, Tensor] | None = None

    def __call__(self, x: Tensor) -> Tensor:
        known, self.known = self.known, None
        if known is not None and known[0] is x:
            return known[1]
        module = self.module
        apply: Callable[..., tuple[Tensor, ...]] = _Linear.apply
        if not (torch.is_grad_enabled() and x.requires_grad):
            return F.linear(x, module.weight, module.bias)
        own, *others = apply(x, module.bias, module.weight, *(other.module.weight for other in self.joined))
        for other, output in zip(self.joined, others, strict=True):
            other.known = x, output
        return own


class _Linear(torch.autograd.Function):
    """The linear maps of one input, the first one with a bias, with the backward pass of ``product``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, weight: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(weight, *others)
        ctx.dtype = x.dtype
        return F.linear(x, weight, bias), *(F.linear(x, other) for other in others)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        terms = [(g, weight.to(g.dtype)) for g, weight in zip(gradients, ctx.saved_tensors, strict=True)]
        return product(*terms[0], *terms[1:]).to(ctx.dtype), *[None] * (1 + len(terms))
