"""Faster products of frozen matrices with few rows on a CPU, as several members need them to decode a token.

In float32, MKL's product of a matrix with 3 to 12 rows takes up to three times as long as its product with one row,
although both read the matrix once. A batched product over blocks of the matrix takes hardly longer than the product
with one row.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MIN_ROWS, MAX_ROWS = 3, 12
"""The numbers of rows for which blocks are used. For two rows blocks are no faster; from 16 rows on MKL is as fast."""

BLOCK = 32
"""Number of outputs of a block. With 16 to 256 outputs the time is the same within 10 %."""


class BlockedLinears:
    """Frozen linear layers whose forwards are replaced: with few rows, they multiply in blocks."""

    def __init__(self, model: nn.Module, random_modules: Collection[nn.Module]) -> None:
        random_ids = {id(module) for module in random_modules}
        has_mkl: Callable[[], bool] = torch.backends.mkl.is_available
        usable = has_mkl()
        self.modules: list[Any] = [
            module
            for module in model.modules()
            if usable and type(module) is nn.Linear and id(module) not in random_ids and _fits(module.weight)
        ]
        self.replaced: list[Any] = []

    def install(self) -> None:
        """Replace the forwards. A layer whose forward was replaced already (by accelerate) is left unchanged."""
        self.replaced = [module for module in self.modules if "forward" not in vars(module)]
        for module in self.replaced:
            module.forward = _BlockedForward(module)

    def remove(self) -> None:
        """Restore the forwards."""
        for module in self.replaced:
            if isinstance(vars(module).get("forward"), _BlockedForward):
                del module.forward
        self.replaced = []


class _BlockedForward:
    """The forward of one linear layer, in blocks if the input has few rows."""

    def __init__(self, module: nn.Linear) -> None:
        self.module = module

    def __call__(self, input: Tensor) -> Tensor:  # the parameter's name is the same as in nn.Linear
        weight, bias = self.module.weight, self.module.bias
        outputs, inputs = weight.shape
        rows = input.numel() // inputs
        if not MIN_ROWS <= rows <= MAX_ROWS or input.shape[-1] != inputs or not _can_block(input, weight):
            return F.linear(input, weight, bias)
        count = outputs // BLOCK
        # one as_strided call each: a token passes through every linear layer, so the cost of more calls is noticeable
        x = input.contiguous().as_strided((count, rows, inputs), (0, inputs, 1))
        blocks = weight.as_strided((count, inputs, BLOCK), (BLOCK * inputs, 1, inputs))
        y = torch.bmm(x, blocks).transpose(0, 1).reshape(*input.shape[:-1], outputs)
        return y if bias is None else y.add_(bias)


def _fits(weight: Tensor) -> bool:
    """Check that the outputs divide into blocks, and that the matrix is contiguous."""
    return weight.shape[0] % BLOCK == 0 and weight.is_contiguous()


def _can_block(x: Tensor, weight: Tensor) -> bool:
    """Check for ordinary float32 tensors on a CPU, without gradients and autocast."""
    return (
        x.dtype == weight.dtype == torch.float32
        and x.is_cpu
        and weight.is_cpu
        and type(weight) in (nn.Parameter, Tensor)
        and _fits(weight)  # the layer may have another weight now
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
    )
