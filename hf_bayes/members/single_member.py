"""A model with a member axis, for a while as the plain model it wraps, showing one member."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import noop_context_fn

from hf_bayes.members.engine import Members
from hf_bayes.members.evaluation_mode import evaluating


@contextmanager
def plain(members: Members, row: Tensor) -> Iterator[dict[str, nn.Parameter]]:
    """Own forwards and parameters until the end of the block, ``row`` [d] written into the random ones.

    The model is in evaluation mode meanwhile (dropout would be another likelihood), except that checkpointed blocks go
    on checkpointing. Modes, values and member forwards are put back.

    Yields:
        {name: the random parameter}; none of them requires grad.
    Raises:
        ValueError: if the member axis has been removed.
    """
    members.require_attached()
    functions: list[tuple[Any, Any]] = []
    context = members.context
    found = dict(members.model.named_parameters(remove_duplicate=False))
    random = {name: found[name] for name in members.layout.names}
    before = {name: parameter.data for name, parameter in random.items()}
    shown = context.tensors, context.num_members
    for item in members.stacked:
        item.remove()
    members.trunk.remove()
    try:
        context.tensors, context.num_members = {}, 1
        for name, value in members.layout.unflatten(row.detach()).items():
            random[name].data = value.to(before[name]).clone()
        with evaluating(members.model):
            checkpointing: list[Any] = [module for module in members.model.modules() if _checkpoints(module)]
            for module in checkpointing:
                module.training = True  # the flag of this module alone: those within it stay in evaluation mode
                functions.append((module, module._gradient_checkpointing_func))
                # the members' context can be entered once, and several backward passes recompute a block several times
                module._gradient_checkpointing_func = partial(functions[-1][1], context_fn=noop_context_fn)
            yield random
    finally:
        for name, parameter in random.items():
            parameter.data = before[name]
        context.tensors, context.num_members = shown
        for item in members.stacked:
            item.install()
        members.trunk.install()
        for module, function in functions:
            module._gradient_checkpointing_func = function


def _checkpoints(module: Any) -> bool:
    """Whether this is a block that recomputes its activations, and that drops nothing out by itself."""
    drops = any("drop" in name and isinstance(value, float) and value > 0 for name, value in vars(module).items())
    switched_on = vars(module).get("gradient_checkpointing", False) is True
    return isinstance(module, nn.Module) and switched_on and not drops
