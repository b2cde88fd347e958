"""The output layer of a classifier: the module from the last hidden state of a row, or of a token, to its logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hf_bayes.models.base import BayesianModel


class OutputLayer:
    """The output layer of a model with one member.

    A model may choose among the outputs of the layer (the last token of a text). It is called with the layer replaced
    by the identity, and so it chooses the hidden state in the same way.

    Args:
        name: the name of the layer in ``core.named_modules()``.
    Raises:
        ValueError: if there is no such module.
    """

    def __init__(self, model: BayesianModel, name: str) -> None:
        modules = dict(model.core.named_modules())
        if name not in modules:
            raise ValueError(
                f"the student reads the input of {name!r}, and {type(model.core).__name__} has no such module: distil "
                "the posterior again"
            )
        self.module = modules[name]

    def hidden(self, model: BayesianModel, inputs: dict[str, Any]) -> Tensor:
        """Return the last hidden states [B, ..., h] of the bound member."""
        with _returns_its_input(self.module):
            return model.members.logits(inputs)[0]

    def logits(self, model: BayesianModel, hidden: Tensor) -> Tensor:
        """Return the logits [n, C] of hidden states [n, h] for the bound member."""
        context = model.members.context
        context.begin(len(hidden), 1, trunk=False)
        try:
            found: Tensor = self.module(hidden)
        finally:
            context.end()
        return found


def find_output_layer(model: BayesianModel, inputs: dict[str, Any]) -> str:
    """Return the name of the output layer: the module that computes logits [..., C] from [..., h] and finishes last.

    Args:
        inputs: a batch without labels; a member must be bound.
    Raises:
        ValueError: if there is no such module, or if its outputs are not the logits of the model.
    """
    finished: list[str] = []
    with _recording(model, finished.append):
        logits = model.members.logits(inputs)[0]
    if finished:
        layer = OutputLayer(model, finished[-1])
        hidden = layer.hidden(model, inputs)
        if hidden.shape[:-1] == logits.shape[:-1]:
            again = layer.logits(model, hidden.flatten(0, -2)).view_as(logits)
            # batches of other shapes round differently
            if torch.allclose(again.float(), logits.float(), rtol=0.02, atol=0.02 * float(logits.abs().max())):
                return finished[-1]
    raise ValueError(
        f"{type(model.core).__name__} has no module that maps hidden states to its logits, which a distilled student "
        "needs: predict by members"
    )


@contextmanager
def _recording(model: BayesianModel, add: Callable[[str], None]) -> Iterator[None]:
    """Call ``add`` with the name of each module that has computed [..., C] from [..., h], in the order of finishing."""

    def hook_of(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            given = _tensors(args, kwargs)
            if len(given) == 1 and isinstance(output, Tensor):
                *shape, _ = given[0].shape
                if output.shape == (*shape, model.num_outputs):
                    add(name)

        return hook

    handles = [
        module.register_forward_hook(hook_of(name), with_kwargs=True) for name, module in model.core.named_modules()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the arguments of a call that are tensors."""
    return [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]


@contextmanager
def _returns_its_input(module: nn.Module) -> Iterator[None]:
    def identity(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        return _tensors(args, kwargs)[0]

    handle = module.register_forward_hook(identity, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
