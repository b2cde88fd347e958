"""Evaluation mode for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode until the end of the block, so that nothing is dropped out; then each module has its own again.

    Its own: ``model.train(before)`` would give all of them that of the outermost, and a frozen part that was kept in
    evaluation mode would drop out from then on.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
