"""The functions here read what transformers does not document.

``transformers_names`` lists the private names, and tests compare the list with the installed version.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from transformers import GenerationMixin
from transformers.models.auto import modeling_auto

from hf_bayes.members.compat.transformers_names import CHECKPOINTING, CHECKPOINTING_FUNCTION, INPUT_GRAD_HOOKS

if TYPE_CHECKING:
    from transformers import Trainer

_CACHE_NAMES = ("cache", "past_key_values", "cache_params")  # the last is Mamba's before transformers 5.24
_parameters = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
CACHE = next(name for name in _CACHE_NAMES if name in _parameters)
"""The argument and the output that hold keys and values: ``cache`` since transformers 5.24, and ``past_key_values``
before."""

# -- gradient checkpointing -------------------------------------------------------------------------------------------


def enable_checkpointing(model: Any, args: Any) -> None:
    """Switch checkpointing on as ``Trainer.train`` does, if the arguments of a trainer ask for it."""
    kind = "activation" if hasattr(args, "activation_checkpointing") else "gradient"
    if getattr(args, f"{kind}_checkpointing"):
        options = dict(getattr(args, f"{kind}_checkpointing_kwargs") or {})
        own = {"every_n_layers": options.pop("every_n_layers", 1), "offload": options.pop("offload", False)}
        getattr(model, f"{kind}_checkpointing_enable")(**{f"{kind}_checkpointing_kwargs": options or None}, **own)


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


# -- configurations ---------------------------------------------------------------------------------------------------


def attention_of(config: Any) -> str | None:
    """Return the implementation of attention that a model uses; None if its configuration has none."""
    found: str | None = getattr(config, "_attn_implementation", None)
    return found


def source_of(config: Any) -> str:
    """Return the name or folder that a configuration was loaded from; empty without one."""
    return str(getattr(config, "_name_or_path", "") or "")


# -- caches ------------------------------------------------------------------------------------------------------------


def cache_of(holder: Any) -> Any:
    """Return the keys and values of a model's output, or among the arguments for a model; None without any."""
    return holder.get(CACHE)


def takes_cache(core: nn.Module) -> bool:
    """Return whether a model reads keys and values of earlier tokens."""
    return CACHE in inspect.signature(core.forward).parameters


def with_cache_named(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments with keys and values as ``CACHE``; they may have the name of any version of transformers.

    Raises:
        ValueError: for keys and values under two names.
    """
    named = dict(arguments)
    given = [cache for name in _CACHE_NAMES if (cache := named.pop(name, None)) is not None]
    if len(given) > 1:
        raise ValueError(
            f"got keys and values twice, under two of the names {', '.join(_CACHE_NAMES)}: give one of them"
        )
    return named | {CACHE: given[0]} if given else named


# -- models -----------------------------------------------------------------------------------------------------------


def num_frames(core: Any, num_samples: int) -> int | None:
    """Return how many frames a model of audio makes of a recording; None if the model has no such method."""
    frames = getattr(core, "_get_feat_extract_output_lengths", None)
    return None if frames is None else int(frames(torch.tensor(num_samples)))


def own_generation_hooks(core: Any) -> list[str]:
    """Return the names of the methods of ``GenerationMixin`` that a model defines by itself."""
    hooks = [name for name, value in vars(GenerationMixin).items() if callable(value) and name != "__init__"]
    return [name for name in hooks if getattr(type(core), name, None) is not getattr(GenerationMixin, name)]


# -- auto classes -----------------------------------------------------------------------------------------------------


def loaders_of_mappings() -> dict[int, str]:
    """Return {id of a mapping of model classes: name of the auto class that chooses from it}."""
    content = vars(modeling_auto)
    return {id(getattr(value, "_model_mapping", None)): key for key, value in content.items() if "Auto" in key}


def names_in_mapping(mapping: Any) -> set[str]:
    """Return the names of the classes in a mapping. None of them is imported."""
    entries = ((names,) if isinstance(names, str) else names for names in mapping._model_mapping.values())
    return set(itertools.chain.from_iterable(entries))


def registered_in_mapping(mapping: Any) -> list[type]:
    """Return the classes that were registered with a mapping by the user."""
    return list(mapping._extra_content.values())


def mappings_with(kind: type, names: Iterable[str], *, by_name: bool) -> list[str]:
    """Return the names of the mappings that hold a class, out of ``names``.

    Args:
        by_name: look for the name of a class of transformers; otherwise for a class that the user registered.
    """
    named = {name: getattr(modeling_auto, name) for name in names}
    if by_name:
        return [name for name, mapping in named.items() if kind.__name__ in names_in_mapping(mapping)]
    return [name for name, mapping in named.items() if kind in registered_in_mapping(mapping)]


# -- pipelines --------------------------------------------------------------------------------------------------------


def batch_size_of(pipeline: Any) -> int | None:
    """Return the batch size that a pipeline was made with."""
    found: int | None = pipeline._batch_size
    return found


def preprocess_settings_of(pipeline: Any) -> Mapping[str, Any]:
    """Return the settings of ``preprocess`` that a pipeline was made with."""
    found: Mapping[str, Any] = pipeline._preprocess_params
    return found


# -- trainers ---------------------------------------------------------------------------------------------------------


def prepared_inputs(trainer: Trainer, batch: Any) -> Any:
    """Return a batch on the trainer's device."""
    return trainer._prepare_inputs(batch)


def output_dir_of(trainer: Trainer, trial: Any) -> str:
    """Return the folder in which a trainer writes its checkpoints."""
    return str(trainer._get_output_dir(trial=trial))


def without_unused_columns(trainer: Trainer, dataset: Any, what: str) -> Any:
    """Return a data set without the columns that a trainer leaves out."""
    return trainer._remove_unused_columns(dataset, description=what)


def collator_without_unused_columns(trainer: Trainer, what: str) -> Callable[..., Any]:
    """Return the trainer's collator behind a step that removes columns that the trainer leaves out."""
    return trainer._get_collator_with_removed_columns(trainer.data_collator, description=what)


def columns_of_subclass(trainer: Trainer) -> list[str]:
    """Return the columns that a subclass of Trainer keeps by a method of its own; empty without such a method."""
    from transformers import Trainer as Stock

    if type(trainer)._set_signature_columns_if_needed is Stock._set_signature_columns_if_needed:
        return []
    trainer._signature_columns = None
    trainer._set_signature_columns_if_needed()
    return list(trainer._signature_columns or [])


def keep_columns(trainer: Trainer, columns: list[str]) -> None:
    """Make a trainer keep these columns, and no others."""
    cast(Any, trainer)._signature_columns = columns  # declared as None
