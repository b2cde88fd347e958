"""Activation checkpointing: a block that runs again in the backward pass must find the members of its first run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from hf_bayes.members.context import Context

_STATE = ("gradient_checkpointing", "_gradient_checkpointing_func")


class Checkpointing:
    """transformers' activation checkpointing on ``core``, whose recomputation is given the context it needs."""

    def __init__(self, core: Any, context: Context) -> None:
        self.core, self.context = core, context
        self.before: list[tuple[Any, dict[str, Any]]] = []

    def install(self) -> None:
        """Remember what ``remove`` puts back, and adopt checkpointing that is on already."""
        self.before = [
            (module, {name: vars(module)[name] for name in _STATE if name in vars(module)})
            for module in self.core.modules()
            if hasattr(module, "gradient_checkpointing")
        ]
        self.adopt()

    def remove(self) -> None:
        for module, state in self.before:
            for name in _STATE:
                vars(module).pop(name, None)
            vars(module).update(state)
        self.before = []

    def enable(self, switch_on: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Call the core's own method that switches checkpointing on, then ``adopt``."""
        hooks = vars(self.core).get("_require_grads_hooks")
        switch_on(*args, **kwargs)
        if not hooks:  # these let embeddings require grad, for reentrant checkpointing: a backward through the trunk
            self.core.disable_input_require_grads()
        if hooks is None:
            vars(self.core).pop("_require_grads_hooks", None)
        self.adopt()

    def adopt(self) -> None:
        """Let every checkpointing function restore the context for its second run.

        Raises:
            ValueError: for reentrant checkpointing, which loses gradients of all but a block's arguments.
        """
        for module, _ in self.before:
            if not module.gradient_checkpointing:
                continue
            function = module._gradient_checkpointing_func
            keywords = getattr(function, "keywords", {})
            if keywords.get("context_fn") == self.context.replayed:
                continue
            if keywords.get("use_reentrant") is not False:
                raise ValueError(
                    "activation checkpointing needs use_reentrant=False (got "
                    f"{keywords.get('use_reentrant', 'no value')}): the other kind loses the members' gradients. Set "
                    'activation_checkpointing_kwargs={"use_reentrant": False}'
                )
            module._gradient_checkpointing_func = partial(function, context_fn=self.context.replayed)
