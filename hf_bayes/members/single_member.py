"""A context manager in which a model with a member axis is an ordinary model with the weights of one member."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import noop_context_fn

from hf_bayes.members.batch_norm import running_statistics
from hf_bayes.members.compat import transformers as compat
from hf_bayes.members.engine import Members
from hf_bayes.members.evaluation_mode import evaluating


@contextmanager
def as_single_model(members: Members, row: Tensor) -> Iterator[dict[str, nn.Parameter]]:
    """Give the model its own forwards until the end of the block, with ``row`` [d] in its random parameters.

    The model is in evaluation mode meanwhile, because dropout would change the likelihood. Checkpointed blocks keep
    checkpointing. Afterwards modes, values and the forwards of the members are restored.

    Yields:
        {name: the random parameter}; none of them requires a gradient.
    Raises:
        ValueError: if the member axis has been removed.
    """
    members.require_attached()
    functions: list[tuple[Any, Any]] = []
    context = members.context
    bound = context.tensors, context.num_members
    for item in members.stacked:
        item.remove()
    members.trunk.remove()
    try:
        context.tensors, context.num_members, members.is_single = {}, 1, True
        with weights_of(members, row) as random, evaluating(members.model):
            for module in [module for module in members.model.modules() if _can_checkpoint(module)]:
                module.training = True  # the flag of this module alone: its submodules stay in evaluation mode
                functions.append((module, compat.checkpointing_function(module)))
                # a member context can be entered once only, but several backward passes recompute a block several times
                compat.set_checkpointing_function(module, partial(functions[-1][1], context_fn=noop_context_fn))
            yield random
    finally:
        context.tensors, context.num_members = bound
        members.is_single = False
        for item in members.stacked:
            item.install()
        members.trunk.install()
        for module, function in functions:
            compat.set_checkpointing_function(module, function)


@contextmanager
def weights_of(members: Members, row: Tensor) -> Iterator[dict[str, nn.Parameter]]:
    """Put ``row`` [d] into the random parameters until the end of the block, and yield these by name.

    Without the forwards of the members (``as_single_model``), the model then computes with this row.
    """
    found: dict[str, Any] = dict(members.model.named_parameters(remove_duplicate=False))
    if not found.keys() >= set(members.layout.names):
        found |= running_statistics(members.model)
    random = {name: found[name] for name in members.layout.names}
    before = {name: parameter.data for name, parameter in random.items()}
    try:
        for name, value in members.layout.unflatten(row.detach()).items():
            random[name].data = value.to(before[name]).clone()
        yield random
    finally:
        for name, parameter in random.items():
            parameter.data = before[name]


def _can_checkpoint(module: nn.Module) -> bool:
    """Check that the module recomputes its activations, and has no dropout rate of its own."""
    return compat.is_checkpointing(module) and not any(
        "drop" in name and isinstance(value, float) and value > 0 for name, value in vars(module).items()
    )
