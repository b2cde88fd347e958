"""The private names of transformers that the package reads or overrides.

``NAMES`` lists them. Some are names of methods that our classes override, and stand in these classes, too. All others
are read by the functions below, or are public names without a documented contract.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from transformers import GenerationMixin
from transformers.models.auto import modeling_auto

from hf_bayes.core.compat import PrivateName

if TYPE_CHECKING:
    from transformers import Trainer

CHECKPOINTING = "gradient_checkpointing"
"""The flag of a module that recomputes its activations in the backward pass."""

_CHECKPOINTING_FUNCTION = "_gradient_checkpointing_func"
"""The function that such a module calls: torch's ``checkpoint`` with its keywords bound."""

_INPUT_GRAD_HOOKS = "_require_grads_hooks"
"""The handles of the hooks that make embeddings require a gradient, for reentrant checkpointing."""

# -- the list ---------------------------------------------------------------------------------------------------------

_BLOCK = "transformers.modeling_layers.GradientCheckpointingLayer"
_LAYER, _CACHE = "transformers.cache_utils.DynamicLayer", "transformers.cache_utils.DynamicCache"
_CONFIG, _MODEL = "transformers.PreTrainedConfig", "transformers.PreTrainedModel"
_GENERATION = "transformers.GenerationMixin"
_MAPPING = "transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING"
_PIPELINE = "transformers.Pipeline"
_TRAINER = "transformers.Trainer"

_OF_MODELS = (
    PrivateName(_BLOCK, CHECKPOINTING, None, "replaced"),
    PrivateName(_BLOCK, _CHECKPOINTING_FUNCTION, None, "replaced"),
    PrivateName(_MODEL, _INPUT_GRAD_HOOKS, None, "replaced"),
    PrivateName(
        _MODEL, "_set_gradient_checkpointing", ("enable", "gradient_checkpointing_func", "every_n_layers"), "called"
    ),
    PrivateName(_MODEL, "enable_input_require_grads", (), "called"),
    PrivateName(_MODEL, "disable_input_require_grads", (), "called"),
    PrivateName(
        _MODEL,
        "_check_and_adjust_attn_implementation",
        ("attn_implementation", "is_init_check", "allow_all_kernels"),
        "overridden",
    ),
    PrivateName(_MODEL, "_check_and_adjust_experts_implementation", ("experts_implementation",), "overridden"),
    PrivateName(_MODEL, "_supports_sdpa", None, "overridden"),
    PrivateName(_MODEL, "_supports_flash_attn", None, "overridden"),
    PrivateName(_MODEL, "_supports_flex_attn", None, "overridden"),
    PrivateName(_MODEL, "_supports_attention_backend", None, "overridden"),
    PrivateName(
        "transformers.Wav2Vec2PreTrainedModel",
        "_get_feat_extract_output_lengths",
        ("input_lengths", "add_adapter"),
        "called",
    ),
    PrivateName(_CONFIG, "_attn_implementation", None, "read"),
    PrivateName(_CONFIG, "_experts_implementation", None, "read"),
    PrivateName(_CONFIG, "_name_or_path", None, "read"),
    PrivateName("transformers.AutoModelForCausalLM", "_model_mapping", None, "read"),
    PrivateName(_MAPPING, "_model_mapping", None, "read"),
    PrivateName(_MAPPING, "_extra_content", None, "read"),
)

_OF_CACHES = (
    PrivateName(_LAYER, "update", ("key_states", "value_states", "args", "kwargs"), "overridden"),
    PrivateName(_LAYER, "lazy_initialization", ("key_states", "value_states"), "called"),
    PrivateName(_LAYER, "reorder_cache", ("beam_idx",), "called"),
    PrivateName(_LAYER, "is_initialized", None, "read"),
    PrivateName(_LAYER, "keys", None, "replaced"),
    PrivateName(_LAYER, "values", None, "replaced"),
    PrivateName(_CACHE, "layers", None, "replaced"),
    PrivateName(_CACHE, "offloading", None, "read"),
)

_TO_PROCESSORS = ("generation_config", "input_ids_seq_length", "encoder_input_ids", "prefix_allowed_tokens_fn",
                  "logits_processor", "device", "model_kwargs", "negative_prompt_ids",
                  "negative_prompt_attention_mask")  # fmt: skip

_OF_GENERATION = (
    PrivateName(_GENERATION, "_reorder_cache", None, "provided"),
    PrivateName(
        _GENERATION,
        "_prepare_generated_length",
        (
            "generation_config",
            "has_default_max_length",
            "has_default_min_length",
            "model_input_name",
            "input_ids_length",
            "inputs_tensor",
        ),
        "overridden",
    ),
    PrivateName(
        _GENERATION,
        "_prepare_cache_for_generation",
        ("generation_config", "model_kwargs", "generation_mode", "batch_size", "max_cache_length"),
        "overridden",
    ),
    PrivateName(
        _GENERATION,
        "_prepare_attention_mask_for_generation",
        ("inputs_tensor", "generation_config", "model_kwargs"),
        "overridden",
    ),
    PrivateName(_GENERATION, "_prepare_position_ids_for_generation", ("inputs_tensor", "model_kwargs"), "overridden"),
    PrivateName(
        _GENERATION,
        "_update_model_kwargs_for_generation",
        ("outputs", "model_kwargs", "is_encoder_decoder", "num_new_tokens"),
        "overridden",
    ),
    PrivateName(
        _GENERATION,
        "_expand_inputs_for_generation",
        ("expand_size", "is_encoder_decoder", "input_ids", "model_kwargs"),
        "overridden",
    ),
    PrivateName(
        _GENERATION,
        "_expand_multimodal_outputs",
        ("input_ids", "mm_encoder_output", "expand_size", "inputs_embeds"),
        "accepted",
    ),
    PrivateName(_GENERATION, "_get_logits_processor", _TO_PROCESSORS, "overridden"),
    PrivateName(
        _GENERATION, "_get_stopping_criteria", ("generation_config", "stopping_criteria", "tokenizer"), "overridden"
    ),
    PrivateName(_GENERATION, "_valid_auto_compile_criteria", ("model_kwargs", "generation_config"), "overridden"),
    PrivateName(_GENERATION, "_validate_model_kwargs", ("model_kwargs",), "overridden"),
)

_OF_PIPELINES = (
    PrivateName(_PIPELINE, "_sanitize_parameters", ("pipeline_parameters",), "overridden"),
    PrivateName(_PIPELINE, "_forward", ("input_tensors", "forward_parameters"), "overridden"),
    PrivateName(_PIPELINE, "_prepare_generate_kwargs", ("generate_kwargs", "overrides"), "overridden"),
    PrivateName(_PIPELINE, "_load_tokenizer", None, "overridden"),
    PrivateName(_PIPELINE, "_load_image_processor", None, "overridden"),
    PrivateName(_PIPELINE, "_load_feature_extractor", None, "overridden"),
    PrivateName(_PIPELINE, "_load_video_processor", None, "overridden"),
    PrivateName(_PIPELINE, "_load_processor", None, "overridden"),
    PrivateName(_PIPELINE, "_batch_size", None, "read"),
    PrivateName(_PIPELINE, "_preprocess_params", None, "read"),
    PrivateName("transformers.pipelines.pipeline", "_from_pipeline", None, "argument"),  # of from_pretrained
)

_OF_TRAINERS = (
    PrivateName(_TRAINER, "_save_checkpoint", ("model", "trial"), "overridden"),
    PrivateName(_TRAINER, "_save_optimizer_and_scheduler", ("output_dir",), "overridden"),
    PrivateName(_TRAINER, "_load_from_checkpoint", ("resume_from_checkpoint", "model"), "overridden"),
    PrivateName(_TRAINER, "_load_optimizer_and_scheduler", ("checkpoint",), "overridden"),
    PrivateName(_TRAINER, "_load_rng_state", ("checkpoint",), "overridden"),
    PrivateName(_TRAINER, "_get_grad_norm", ("model", "grad_norm"), "overridden"),
    PrivateName(_TRAINER, "_prepare_inputs", ("inputs",), "called"),
    PrivateName(_TRAINER, "_remove_unused_columns", ("dataset", "description"), "called"),
    PrivateName(_TRAINER, "_get_collator_with_removed_columns", ("data_collator", "description"), "called"),
    PrivateName(_TRAINER, "_set_signature_columns_if_needed", (), "called"),
    PrivateName(_TRAINER, "_signature_columns", None, "replaced"),
    PrivateName(_TRAINER, "_get_output_dir", ("trial",), "called"),
    PrivateName(_TRAINER, "compute_loss_context_manager", (), "called"),
    PrivateName(_TRAINER, "_get_train_sampler", ("train_dataset",), "refused"),  # see checks.host_trainers
)

NAMES = (*_OF_MODELS, *_OF_CACHES, *_OF_GENERATION, *_OF_PIPELINES, *_OF_TRAINERS)
"""The private names of transformers."""

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
    return {name: own[name] for name in (CHECKPOINTING, _CHECKPOINTING_FUNCTION) if name in own}


def restore_checkpointing_state(module: nn.Module, state: dict[str, Any]) -> None:
    """Undo all changes of the module's checkpointing since ``state`` was read."""
    for name in (CHECKPOINTING, _CHECKPOINTING_FUNCTION):
        vars(module).pop(name, None)
    vars(module).update(state)


def is_checkpointing(module: nn.Module) -> bool:
    """Check whether checkpointing has been switched on for this module itself."""
    return vars(module).get(CHECKPOINTING, False) is True


def checkpointing_function(module: Any) -> Callable[..., Any]:
    """Return the function that the module calls to recompute its activations."""
    function: Callable[..., Any] = getattr(module, _CHECKPOINTING_FUNCTION)
    return function


def set_checkpointing_function(module: Any, function: Callable[..., Any]) -> None:
    """Replace the function that the module calls to recompute its activations."""
    setattr(module, _CHECKPOINTING_FUNCTION, function)


def input_grad_hooks(model: nn.Module) -> list[Any] | None:
    """Return the handles of the hooks on embeddings; None if the model never had such hooks."""
    hooks: list[Any] | None = vars(model).get(_INPUT_GRAD_HOOKS)
    return hooks


def forget_input_grad_hooks(model: nn.Module) -> None:
    """Leave the model as one that never had hooks on its embeddings."""
    vars(model).pop(_INPUT_GRAD_HOOKS, None)


# -- configurations ---------------------------------------------------------------------------------------------------


def attention_of(config: Any) -> str | None:
    """Return the implementation of attention that a model uses; None if its configuration has none."""
    found: str | None = getattr(config, "_attn_implementation", None)
    return found


def source_of(config: Any) -> str:
    """Return the name or folder that a configuration was loaded from; empty without one."""
    return str(getattr(config, "_name_or_path", "") or "")


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
