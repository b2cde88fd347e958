"""The private names of transformers, peft and torch that this package reads or replaces.

``HOOKS`` lists them, and tests/members/test_compat.py compares the list with the installed versions. All other modules
of this package use the functions below.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn

CHECKPOINTING = "gradient_checkpointing"
"""The flag of a module that recomputes its activations in the backward pass."""

CHECKPOINTING_FUNCTION = "_gradient_checkpointing_func"
"""The function that such a module calls: torch's ``checkpoint`` with its keywords bound."""

INPUT_GRAD_HOOKS = "_require_grads_hooks"
"""The handles of the hooks that make embeddings require a gradient, for reentrant checkpointing."""


class Hook(NamedTuple):
    """A name of a host library that this package reads, calls or replaces.

    Attributes:
        owner: dotted path of the class that has the name.
        name: the attribute or method.
        parameters: the first parameters of the method after ``self``; None for an attribute.
        use: what this package does with it.
    """

    owner: str
    name: str
    parameters: tuple[str, ...] | None
    use: str


_BLOCK = "transformers.modeling_layers.GradientCheckpointingLayer"
_MODEL = "transformers.modeling_utils.PreTrainedModel"
_LAYER = "transformers.cache_utils.DynamicLayer"
_CACHE = "transformers.cache_utils.DynamicCache"
_LORA = "peft.tuners.lora.layer.LoraLayer"

HOOKS = (
    Hook(_BLOCK, CHECKPOINTING, None, "read and restored"),
    Hook(_MODEL, "_set_gradient_checkpointing", ("enable", "gradient_checkpointing_func"), "sets the function above"),
    Hook(_MODEL, "enable_input_require_grads", (), "sets the handles above"),
    Hook(_MODEL, "disable_input_require_grads", (), "called"),
    Hook(_LAYER, "update", ("key_states", "value_states"), "overridden by RoomyLayer"),
    Hook(_LAYER, "lazy_initialization", ("key_states", "value_states"), "called by RoomyLayer"),
    Hook(_LAYER, "reorder_cache", ("beam_idx",), "called"),
    Hook(_LAYER, "is_initialized", None, "read"),
    Hook(_LAYER, "keys", None, "read and replaced"),
    Hook(_LAYER, "values", None, "read and replaced"),
    Hook(_CACHE, "layers", None, "read and replaced"),
    Hook(_CACHE, "offloading", None, "read"),
    Hook(_LORA, "adapter_layer_names", None, "read"),
    Hook(_LORA, "lora_variant", None, "read"),
    Hook("torch.nn.Module", "__getattr__", ("name",), "entries of the instance's dictionary shadow parameters"),
)
"""All names that are private, or public without a documented contract."""


def checkpointing_modules(model: nn.Module) -> list[Any]:
    """Return the modules of a model that have a checkpointing flag."""
    return [module for module in model.modules() if hasattr(module, CHECKPOINTING)]


def checkpointing_state(module: nn.Module) -> dict[str, Any]:
    """Return the module's own checkpointing flag and function, as far as it has them."""
    own = vars(module)
    return {name: own[name] for name in (CHECKPOINTING, CHECKPOINTING_FUNCTION) if name in own}


def restore_checkpointing_state(module: nn.Module, state: dict[str, Any]) -> None:
    """Undo all changes of the module's checkpointing since ``state`` was read."""
    for name in (CHECKPOINTING, CHECKPOINTING_FUNCTION):
        vars(module).pop(name, None)
    vars(module).update(state)


def is_checkpointing(module: nn.Module) -> bool:
    """Check whether checkpointing has been switched on for this module itself."""
    return vars(module).get(CHECKPOINTING, False) is True


def checkpointing_function(module: Any) -> Callable[..., Any]:
    """Return the function that the module calls to recompute its activations."""
    function: Callable[..., Any] = getattr(module, CHECKPOINTING_FUNCTION)
    return function


def set_checkpointing_function(module: Any, function: Callable[..., Any]) -> None:
    """Replace the function that the module calls to recompute its activations."""
    setattr(module, CHECKPOINTING_FUNCTION, function)


def input_grad_hooks(model: nn.Module) -> list[Any] | None:
    """Return the handles of the hooks on embeddings; None if the model never had such hooks."""
    hooks: list[Any] | None = vars(model).get(INPUT_GRAD_HOOKS)
    return hooks


def forget_input_grad_hooks(model: nn.Module) -> None:
    """Leave the model as one that never had hooks on its embeddings."""
    vars(model).pop(INPUT_GRAD_HOOKS, None)


def forward_with(module: nn.Module, values: dict[str, Tensor], x: Tensor) -> Tensor:
    """Run the forward of the module's class, without hooks, with ``values`` in place of its parameters."""
    try:
        module.__dict__.update(values)  # found before nn.Module.__getattr__ looks among the parameters
        result: Tensor = type(module).forward(module, x)
        return result
    finally:
        for name in values:
            module.__dict__.pop(name, None)
