"""Frozen layers in few bits: any will do that hands gradients back to its input."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from hf_bayes.core.layout import is_dense


def guard(model: nn.Module) -> list[Any]:
    """Hooks, to be removed by their ``remove``, on linear layers that are not torch's own.

    They raise a ValueError that names the layer when a gradient would end there: what lies below would be sampled
    from its prior alone, and nobody told. Layers made for inference do this (activations in int8, kernels for
    packed weights); below the first random layer they do no harm.
    """
    return [module.register_forward_hook(_Passing(path)) for path, module in foreign_linears(model)]


def foreign_linears(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Linear layers that are not torch's own, or whose numbers are packed, and their names."""
    for path, module in model.named_modules():
        foreign = "Linear" in type(module).__name__ and type(module) is not nn.Linear
        quantised = any(not is_dense(parameter) for parameter in module.parameters(recurse=False))
        if (foreign or quantised) and not isinstance(module, BaseTunerLayer):
            yield path, module


class _Passing:
    def __init__(self, path: str) -> None:
        self.path, self.probed = path, False

    def __call__(self, module: nn.Module, args: tuple, output: Any) -> None:
        if len(args) != 1 or not all(isinstance(value, Tensor) for value in (*args, output)):
            return  # a name with "Linear" in it, and no linear layer
        (x,) = args
        if not torch.is_grad_enabled() or not x.requires_grad:
            return
        if not output.requires_grad or not (self.probed or _hands_back(module, x)):
            raise ValueError(
                f"{self.path} ({type(module).__module__}.{type(module).__name__}) hands no gradient back to its input: "
                "random parameters below it would be sampled from their prior alone. Quantise the base in another way "
                "(docs/models.md), or make only layers above it random"
            )
        self.probed = True


def _hands_back(module: nn.Module, x: Tensor) -> bool:
    """Whether one position of ``x`` gets a gradient: an operator without one may still say that its output has it."""
    one = x.detach().reshape(-1, x.shape[-1])[-1:].requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own about such operators
        (grad,) = torch.autograd.grad(module.forward(one).sum(), one, allow_unused=True)
    return grad is not None and bool(grad.any())
