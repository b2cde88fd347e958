"""Private names of transformers, torch and lm_eval that ``models`` and ``pipelines`` override or read.

``HOOKS`` and ``ATTRIBUTES`` list the names that stand in our classes, ``ALLOWED`` and ``CONFIG_FIELDS`` the names that
stand there as text. ``READ`` lists the names that the functions below read. ``tests/models/test_compat.py`` compares
the lists with the installed versions and with our classes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from transformers import GenerationMixin
from transformers.models.auto import modeling_auto

# -- the lists --------------------------------------------------------------------------------------------------------


class PrivateMethod(NamedTuple):
    """A private method of a host class.

    Attributes:
        owner: the host class, by its full name.
        name: of the method.
        parameters: their names, without ``self``. None if the host looks the method up and has none of its own.
    """

    owner: str
    name: str
    parameters: tuple[str, ...] | None


_MODEL, _GENERATION = "transformers.PreTrainedModel", "transformers.GenerationMixin"
_PIPELINE = "transformers.Pipeline"
_HARNESS = "lm_eval.models.huggingface.HFLM"

HOOKS = (
    PrivateMethod("torch.nn.Module", "_apply", ("fn", "recurse")),
    PrivateMethod(
        _MODEL, "_check_and_adjust_attn_implementation", ("attn_implementation", "is_init_check", "allow_all_kernels")
    ),
    PrivateMethod(_MODEL, "_check_and_adjust_experts_implementation", ("experts_implementation",)),
    PrivateMethod(_GENERATION, "_reorder_cache", None),
    PrivateMethod(
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
    ),
    PrivateMethod(
        _GENERATION,
        "_prepare_cache_for_generation",
        ("generation_config", "model_kwargs", "generation_mode", "batch_size", "max_cache_length"),
    ),
    PrivateMethod(
        _GENERATION,
        "_prepare_attention_mask_for_generation",
        ("inputs_tensor", "generation_config", "model_kwargs"),
    ),
    PrivateMethod(_GENERATION, "_prepare_position_ids_for_generation", ("inputs_tensor", "model_kwargs")),
    PrivateMethod(
        _GENERATION,
        "_update_model_kwargs_for_generation",
        ("outputs", "model_kwargs", "is_encoder_decoder", "num_new_tokens"),
    ),
    PrivateMethod(
        _GENERATION,
        "_expand_inputs_for_generation",
        ("expand_size", "is_encoder_decoder", "input_ids", "model_kwargs"),
    ),
    PrivateMethod(_GENERATION, "_get_stopping_criteria", ("generation_config", "stopping_criteria", "tokenizer")),
    PrivateMethod(_GENERATION, "_valid_auto_compile_criteria", ("model_kwargs", "generation_config")),
    PrivateMethod(_GENERATION, "_validate_model_kwargs", ("model_kwargs",)),
    PrivateMethod(_PIPELINE, "_sanitize_parameters", ("pipeline_parameters",)),
    PrivateMethod(_PIPELINE, "_forward", ("input_tensors", "forward_parameters")),
    PrivateMethod(_PIPELINE, "_prepare_generate_kwargs", ("generate_kwargs", "overrides")),
    PrivateMethod(_HARNESS, "_loglikelihood_tokens", ("requests", "disable_tqdm", "override_bs")),
)
"""Methods that our classes override. Some of them call the host's own method."""

ALLOWED = (
    PrivateMethod(
        _GENERATION,
        "_expand_multimodal_outputs",
        ("input_ids", "mm_encoder_output", "expand_size", "inputs_embeds"),
    ),
)
"""Methods that a model of the user may define by itself, although ours neither override nor call them."""

ATTRIBUTES = (
    (_MODEL, "_supports_sdpa"),
    (_MODEL, "_supports_flash_attn"),
    (_MODEL, "_supports_flex_attn"),
    (_MODEL, "_supports_attention_backend"),
    (_PIPELINE, "_load_tokenizer"),
    (_PIPELINE, "_load_image_processor"),
    (_PIPELINE, "_load_feature_extractor"),
    (_PIPELINE, "_load_video_processor"),
    (_PIPELINE, "_load_processor"),
)
"""(class, name) of class attributes that ours set."""

PRIVATE_ARGUMENTS = ("_from_pipeline",)
"""Keyword arguments with which ``transformers.pipeline`` calls ``from_pretrained``."""


CONFIG_FIELDS = ("_attn_implementation", "_experts_implementation", "_commit_hash", "_name_or_path")
"""Private attributes of ``PreTrainedConfig``. They are read, or left out of fingerprints by their names."""

READ = ("_get_feat_extract_output_lengths", "_model_mapping", "_extra_content", "_batch_size", "_preprocess_params")
"""Private names of models, auto classes, their mappings and pipelines, which the functions below read."""


# -- configurations ---------------------------------------------------------------------------------------------------


def attention_of(config: Any) -> str | None:
    """Return the implementation of attention that a model uses; None if its configuration has none."""
    found: str | None = getattr(config, "_attn_implementation", None)
    return found


def commit_of(config: Any) -> str | None:
    """Return the commit of the repository that a configuration was loaded from."""
    found: str | None = getattr(config, "_commit_hash", None)
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
