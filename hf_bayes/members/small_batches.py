"""Frozen products of few rows on a CPU: what members bring to decoding, token by token.

MKL's product of a matrix and 3 to 12 rows in float32 takes up to three times as long as that of one row, though both
read the matrix once; a batched product over blocks of the matrix's rows takes hardly longer than that of one row.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MIN_ROWS, MAX_ROWS = 3, 12
"""Two rows gain nothing, and from 16 on the library's own product is as fast."""

BLOCK = 32
"""Outputs of a block; with 16 to 256 the time is the same within 10 %."""


class FewRows:
    """Borrows frozen linear layers, as ``Stacked`` does random ones: with few rows they go in blocks."""

    def __init__(self, model: nn.Module, random_modules: Collection[nn.Module]) -> None:
        random_ids = {id(module) for module in random_modules}
        usable = torch.backends.mkl.is_available()
        self.modules: list[Any] = [
            module
            for module in model.modules()
            if usable and type(module) is nn.Linear and id(module) not in random_ids and _fits(module.weight)
        ]
        self.lent: list[Any] = []

    def install(self) -> None:
        # whoever has put a forward there (accelerate does) keeps it
        self.lent = [module for module in self.modules if "forward" not in vars(module)]
        for module in self.lent:
            module.forward = _Forward(module)

    def remove(self) -> None:
        for module in self.lent:
            if isinstance(vars(module).get("forward"), _Forward):
                del module.forward
        self.lent = []


class _Forward:
    """The forward of one layer."""

    def __init__(self, module: nn.Linear) -> None:
        self.module = module

    def __call__(self, input: Tensor) -> Tensor:  # named as nn.Linear's
        weight, bias = self.module.weight, self.module.bias
        outputs, inputs = weight.shape
        rows = input.numel() // inputs
        if not MIN_ROWS <= rows <= MAX_ROWS or input.shape[-1] != inputs or not _plain(input, weight):
            return F.linear(input, weight, bias)
        count = outputs // BLOCK
        # a view each and no more: in a token there are as many of them as linear layers, and they show
        x = input.contiguous().as_strided((count, rows, inputs), (0, inputs, 1))
        blocks = weight.as_strided((count, inputs, BLOCK), (BLOCK * inputs, 1, inputs))
        y = torch.bmm(x, blocks).transpose(0, 1).reshape(*input.shape[:-1], outputs)
        return y if bias is None else y.add_(bias)


def _fits(weight: Tensor) -> bool:
    return weight.shape[0] % BLOCK == 0 and weight.is_contiguous()


def _plain(x: Tensor, weight: Tensor) -> bool:
    """float32 on a CPU, nothing to differentiate or to round, and no kind of tensor with products of its own."""
    return (
        x.dtype == weight.dtype == torch.float32
        and x.is_cpu
        and weight.is_cpu
        and type(weight) in (nn.Parameter, Tensor)
        and _fits(weight)  # another may have taken its place
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
    )
