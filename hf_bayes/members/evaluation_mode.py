"""A context manager for evaluation mode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Set the model to evaluation mode, without dropout, until the end of the block.

    Afterwards every module gets its own mode back. ``model.train(mode)`` would give all modules the mode of the model,
    and would switch on dropout in a frozen part that was in evaluation mode.
    """
    modes = [(module, module.training) for module in model.modules()]
    if any(mode for _, mode in modes):
        model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            if module.training != mode:  # to set an attribute of a module takes time
                module.training = mode
