"""Activation checkpointing: a block that is recomputed in the backward pass needs the members of its first run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from hf_bayes.members.compat import transformers as compat
from hf_bayes.members.compat.transformers_names import CHECKPOINTING
from hf_bayes.members.context import Context

States = list[tuple[Any, dict[str, Any]]]
"""Modules, each with its own flag and function of checkpointing."""


class Checkpointing:
    """The activation checkpointing of a transformers model ``core``, with the context restored for recomputation.

    Raises:
        ValueError: for reentrant checkpointing that is already on, before anything of the model has changed.
    """

    def __init__(self, core: Any, context: Context) -> None:
        self.core, self.context = core, context
        self.states: States = []
        for module in compat.checkpointing_modules(core):
            _require_not_reentrant(module)

    def install(self) -> None:
        """Save the state that ``remove`` restores, and adapt checkpointing that is already on."""
        self.states = self._present()
        self.adapt()

    def remove(self) -> None:
        """Restore the saved state of all modules."""
        _restore(self.states)
        self.states = []

    def record(self) -> Callable[[], None]:
        """Return a function that gives all modules the state back that they have now."""
        return partial(_restore, self._present())

    def enable(self, switch_on: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Switch checkpointing on by ``switch_on``, a method of the core, then ``adapt`` it.

        Raises:
            ValueError: as ``adapt``; checkpointing is then as it was.
        """
        restore = self.record()
        hooks = compat.input_grad_hooks(self.core)
        switch_on(*args, **kwargs)
        if not hooks:  # new hooks would let embeddings require a gradient: a needless backward pass through the trunk
            self.core.disable_input_require_grads()
        if hooks is None:
            compat.forget_input_grad_hooks(self.core)
        try:
            self.adapt()
        except ValueError:
            restore()
            raise

    def _present(self) -> States:
        return [(module, compat.checkpointing_state(module)) for module in compat.checkpointing_modules(self.core)]

    def adapt(self) -> None:
        """Make every checkpointing function restore the context for its second run.

        Raises:
            ValueError: for reentrant checkpointing, which loses all gradients except those of a block's arguments.
        """
        for module, _ in self.states:
            if not getattr(module, CHECKPOINTING):
                continue
            function = compat.checkpointing_function(module)
            if getattr(function, "keywords", {}).get("context_fn") == self.context.replayed:
                continue
            _require_not_reentrant(module)
            compat.set_checkpointing_function(module, partial(function, context_fn=self.context.replayed))


def _restore(states: States) -> None:
    for module, state in states:
        compat.restore_checkpointing_state(module, state)


def _require_not_reentrant(module: Any) -> None:
    """Raise a ValueError if a module has reentrant checkpointing switched on."""
    if not getattr(module, CHECKPOINTING):
        return
    keywords = getattr(compat.checkpointing_function(module), "keywords", {})
    if keywords.get("use_reentrant") is not False:
        raise ValueError(
            "activation checkpointing needs use_reentrant=False (got "
            f"{keywords.get('use_reentrant', 'no value')}): the other kind loses the members' gradients. Set "
            'activation_checkpointing_kwargs={"use_reentrant": False}'
        )
