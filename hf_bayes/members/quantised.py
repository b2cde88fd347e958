"""Quantised frozen layers. A layer of any kind is accepted if it propagates gradients to its input."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from hf_bayes.core.layout import is_dense


def guard(model: nn.Module) -> list[Any]:
    """Register hooks on linear layers that are not torch's own, and return their handles.

    A hook raises a ValueError that names the layer, if the layer does not propagate gradients to its input. Random
    parameters below such a layer would silently be sampled from their prior. Layers made for inference do not propagate
    gradients (int8 activations, kernels for packed weights). Below the first random layer they do no harm.
    """
    return [module.register_forward_hook(_GradientCheck(path)) for path, module in foreign_linears(model)]


def foreign_linears(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield (path, module) for linear layers that are not torch's own, or whose weights are packed."""
    for path, module in model.named_modules():
        foreign = "Linear" in type(module).__name__ and type(module) is not nn.Linear and _owns_weight(module)
        quantised = any(not is_dense(parameter) for parameter in module.parameters(recurse=False))
        if (foreign or quantised) and not isinstance(module, BaseTunerLayer):
            yield path, module


def _owns_weight(module: nn.Module) -> bool:
    """Return whether a module has weights of its own, and no linear layer or convolution in it.

    Whole blocks may have "Linear" in their class names, such as the linear attention of MobileViTV2. A call of such a
    block would be a call of the model's own layers, which count their rows.
    """
    values = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    # torch's int8 layer has a method ``weight``, and its numbers in a module without parameters
    own = bool(values) or hasattr(type(module), "weight")
    return own and not any(_has_matrix(part) for part in module.modules() if part is not module)


def _has_matrix(module: nn.Module) -> bool:
    """Return whether a module is a linear layer or a convolution with parameters."""
    name = type(module).__name__
    return ("Linear" in name or "Conv" in name) and any(True for _ in module.parameters())


def maps_one_tensor(args: tuple[Any, ...], output: Any) -> bool:
    """Return whether a module was called with one tensor, and returned one, as a linear layer does."""
    return len(args) == 1 and all(isinstance(value, Tensor) for value in (*args, output))


class _GradientCheck:
    """A forward hook that checks, once, that a layer propagates gradients to its input."""

    def __init__(self, path: str) -> None:
        self.path, self.passed = path, False

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not maps_one_tensor(args, output) or not output.is_floating_point():
            return  # not a linear layer, in spite of its name
        (x,) = args
        if not torch.is_grad_enabled() or not x.requires_grad or not x.numel():
            return
        if not output.requires_grad or not (self.passed or _propagates_gradients(module, x)):
            raise ValueError(
                f"{self.path} ({type(module).__module__}.{type(module).__name__}) propagates no gradient to its input: "
                "random parameters below it would be sampled from their prior alone. Quantise the base in another way "
                "(docs/models.md), or make only layers above it random"
            )
        self.passed = True


def _propagates_gradients(module: nn.Module, x: Tensor) -> bool:
    """Check that the first row of ``x`` gets a gradient, or all rows of ``x`` if the layer does not take a single one.

    The check needs a backward pass: an operator without a gradient may still return an output that requires one. If the
    backward pass raises an error, training raises the same error, so no gradient is lost in silence.
    """
    # activation checkpointing would recompute the whole block for the tensors that this backward pass needs
    unsaved = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    with warnings.catch_warnings(), unsaved:
        warnings.simplefilter("ignore")  # torch warns of operators without a gradient
        for rows in (x[:1], x):
            try:
                return _has_gradient(module, rows.detach().requires_grad_())
            except torch.OutOfMemoryError:
                raise
            except Exception:
                continue
    return True


def _has_gradient(module: nn.Module, x: Tensor) -> bool:
    """Return whether ``x`` gets a gradient that is not 0."""
    output = module.forward(x).sum()
    (grad,) = torch.autograd.grad(output, x, allow_unused=True) if output.requires_grad else (None,)
    return grad is not None and bool(grad.any())
