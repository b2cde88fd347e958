"""The base model of a posterior: which models are supported, and fingerprints that identify model and tokenizer."""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Mapping
from numbers import Number
from typing import Any, cast

from peft import LoraConfig, PeftConfig, PeftModel, PeftType
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from hf_bayes.core.hashing import fingerprint_json, fingerprint_tensors
from hf_bayes.core.layout import Layout
from hf_bayes.members.batch_norm import running_statistics, stored_buffers
from hf_bayes.members.compat import transformers as compat
from hf_bayes.models.loading import lora_layers
from hf_bayes.models.loading.base_location import cached_commit, refuse_bare_adapter, revision_of
from hf_bayes.models.loading.config_fingerprint import evaluation_fields
from hf_bayes.posteriors import lora_config
from hf_bayes.posteriors.storage.json_types import as_list, is_texts
from hf_bayes.posteriors.storage.json_values import json_value
from hf_bayes.posteriors.tasks import SUPPORTED

_HEAD = ("problem_type", "pad_token_id", "bos_token_id", "eos_token_id")
"""Fields that a run may set in its model's config: Trainer copies the special tokens of the tokenizer."""
_PROBLEMS = ("regression", "single_label_classification", "multi_label_classification")


def core_of(model: nn.Module) -> nn.Module:
    """Return the model inside peft's wrapper, or the model itself if it has none."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


def num_labels_of(config: PreTrainedConfig) -> int:
    """Return the number of outputs of a head. The annotations of transformers allow None, which no model has."""
    return cast(int, config.num_labels)


def config_of_adapter(model: nn.Module) -> PeftConfig | None:
    """Return the config of the active adapter; None for a model without an adapter."""
    return model.peft_config[model.active_adapter] if isinstance(model, PeftModel) else None


def refuse_foreign(model: nn.Module, core: nn.Module) -> None:
    """Raise for a model that cannot have a member axis, before anything is read or changed."""
    foreign = not isinstance(core, PreTrainedModel)
    if foreign or cast(PreTrainedModel, core).config.is_encoder_decoder:
        kind = "not a transformers model" if foreign else "an encoder-decoder model"
        raise ValueError(
            f"{type(core).__name__} is {kind}; supported are {SUPPORTED}. Take one of these (docs/models.md)"
        )
    if (adapter := config_of_adapter(model)) is not None:
        _refuse_adapter(adapter)
    refuse_spread(core)


def _refuse_adapter(config: PeftConfig) -> None:
    if config.is_prompt_learning:
        kind = cast(PeftType, config.peft_type).value
        raise ValueError(
            f"an adapter of peft's {kind} adds virtual tokens outside the model's layers, which a "
            "member axis cannot see. Use LoRA, or give the model without it (get_base_model())"
        )
    start = getattr(config, "init_lora_weights", None)
    if isinstance(start, str) and start.startswith("pissa_niter"):
        raise ValueError(
            f"init_lora_weights={start!r} takes a random decomposition off the base model's weights, which cannot be "
            "repeated: a posterior of it could not be loaded. Use 'pissa', which is exact"
        )
    if isinstance(config, LoraConfig):
        lora_config.check_start(start, "the adapter of this model")
        if config.layer_replication:
            raise ValueError(
                "layer_replication copies layers of the base model, which a posterior cannot hold. Give a model that "
                "has these layers"
            )


def refuse_spread(core: nn.Module) -> None:
    """Raise if a model's weights are on several devices, or offloaded: members need them on one device.

    Call this function before the weights are read.
    """
    devices = sorted({str(device) for device in (getattr(core, "hf_device_map", None) or {}).values()})
    found = devices if len(devices) > 1 else sorted({str(parameter.device) for parameter in core.parameters()})
    if len(found) > 1 or found == ["meta"]:
        raise ValueError(
            f"the base model is spread over {found}: members need it on one device. Load it with, e.g., "
            "device_map='cuda:0'"
        )


def describe(model: nn.Module, core: PreTrainedModel, layout: Layout, tokenizer: Any = None) -> dict[str, Any]:
    """Return the ``base_model`` entry of a posterior: name, revision, dtype and fingerprints.

    The fingerprint leaves random parameters out. The posterior has their values; a fresh head's values mean nothing.
    """
    config = core.config
    words = tokenizer_in(tokenizer)
    return {
        "name_or_path": _name(model, core),
        "revision": cached_commit(_name(model, core), revision_of(model, core)),
        "dtype": str(core.dtype).removeprefix("torch."),
        "fingerprint": {
            "weights": fingerprint_weights(model, layout),
            "config": fingerprint_json(evaluation_fields(config.to_dict())),
            "tokenizer": None if words is None else fingerprint_tokenizer(words),
        },
    }


def warn_of_resized_base(model: nn.Module, core: PreTrainedModel) -> None:
    """Warn if the base has another number of tokens than the model that its name or folder holds.

    A posterior names its base and does not hold it. Embeddings that were resized in memory are nowhere else.
    """
    name = _name(model, core)
    try:
        stored = AutoConfig.from_pretrained(name, local_files_only=True).get_text_config().vocab_size
        found = core.config.get_text_config().vocab_size
    except (OSError, ValueError, AttributeError):  # a model of no folder, or without a vocabulary
        return
    if found != stored:
        warnings.warn(
            f"the base model has {found} tokens, and {name!r} has {stored}: it was resized in memory. A posterior does "
            "not hold its base model, so this one loads only with the resized model. Save that model (save_pretrained) "
            "before training, and load it from its folder",
            stacklevel=2,
        )


def tokenizer_in(given: Any) -> PreTrainedTokenizerBase | None:
    """Return a tokenizer, or the tokenizer of a processor of images and text; None for any other object."""
    words = getattr(given, "tokenizer", given)
    return words if isinstance(words, PreTrainedTokenizerBase) else None


def fingerprint_weights(model: nn.Module, layout: Layout) -> str:
    """Return the fingerprint of the frozen weights."""
    return fingerprint_tensors(_base_parameters(model, layout))


def describe_head(core: PreTrainedModel, noise_std: float | None) -> dict[str, Any]:
    """Return the ``head`` entry of a posterior: the settings with which its base model is loaded and quantised.

    Args:
        noise_std: the standard deviation of the noise of a regression; None for other heads.
    """
    head = {name: value for name in _HEAD if (value := getattr(core.config, name, None)) is not None}
    head = {name: value for name, value in head.items() if not (isinstance(value, int) and value < 0)}  # -1: no token
    if not core.can_generate():
        head["labels"] = label_names(core.config)
    quantization = getattr(core.config, "quantization_config", None)
    if quantization is not None:
        head["quantization_config"] = quantization if isinstance(quantization, dict) else quantization.to_dict()
    return head if noise_std is None else head | {"noise_std": noise_std}


def label_names(config: Any) -> list[str]:
    """Return the names of a head's outputs, in their order.

    transformers turns the keys of ``id2label`` into numbers where it reads a config from a file, and keeps "0" where a
    user sets it. A name that is a number becomes a text.

    Raises:
        ValueError: if an output has no number or no name.
    """
    given = config.id2label if isinstance(config.id2label, Mapping) else dict(enumerate(config.id2label))
    names = {int(key) if isinstance(key, str) and key.isdecimal() else key: name for key, name in given.items()}
    if len(names) != len(given) or set(names) != set(range(len(given))):
        raise ValueError(
            f"id2label of the model's config has the keys {list(given)!r:.200}, expected 0 to {len(given) - 1}, one "
            "for each output: number the labels from 0, as model.config.id2label = dict(enumerate(names)) does"
        )
    for index, name in names.items():
        if not isinstance(name, (str, Number)):
            raise ValueError(
                f"id2label of the model's config has the name {name!r:.200} of output {index}, expected a text or a "
                "number: give each output a name"
            )
    return [str(names[index]) for index in range(len(names))]


def head_settings(head: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``AutoConfig.from_pretrained`` that give a base model the recorded head."""
    settings = {name: head[name] for name in _HEAD if name in head}
    if "labels" in head:
        settings["id2label"] = dict(enumerate(head["labels"]))
        settings["label2id"] = {label: index for index, label in enumerate(head["labels"])}
    return settings


def check_head(head: dict[str, Any], config: Any, layout: Layout) -> None:
    """Raise for invalid settings of a head, before a model is built.

    Args:
        head: the ``head`` entry of a posterior.
        config: the config of the base model without these settings.
        layout: the posterior's parameters. A head of another size must be among them.

    Raises:
        ValueError: naming the setting.
    """
    ids = [head.get(name) for name in _HEAD if name.endswith("_token_id")]
    flat = [number for value in ids for number in as_list(value)]
    if odd := [n for n in flat if n is not None and (type(n) is not int or not 0 <= n < 2**31)]:
        raise ValueError(f"a special token of the posterior's head is {odd[0]!r:.100}, expected an id >= 0")
    if (kind := head.get("problem_type")) not in (None, *_PROBLEMS):
        raise ValueError(
            f"problem_type of the posterior's head is {kind!r:.100}, expected one of {', '.join(_PROBLEMS)}"
        )
    labels = head.get("labels", [])
    if not is_texts(labels):
        raise ValueError(f"labels of the posterior's head must be a list of names, got {labels!r:.100}")
    if labels and len(labels) != config.num_labels and all(shape[:1] != (len(labels),) for shape in layout.shapes):
        raise ValueError(
            f"the posterior's head has {len(labels):,} labels, its base model {config.num_labels:,}, and no parameter "
            "of the posterior has as many rows: refused"
        )


def fingerprint_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the fingerprint of vocabulary, merges and normalisation, without padding and truncation."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return fingerprint_json(tokenizer.get_vocab())
    content = json.loads(backend.to_str())
    return fingerprint_json({k: v for k, v in content.items() if k not in ("padding", "truncation")})


def differences(expected: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """Return the differences between two base models, in words; empty if the posterior can run on this one."""
    words = {
        "weights": "other weights",
        "config": "another architecture or configuration",
        "tokenizer": "another tokenizer",
    }
    problems = []
    if expected["dtype"] not in (None, found["dtype"]):
        problems.append(f"dtype {found['dtype']} where the posterior was made with {expected['dtype']}")
    for part, description in words.items():
        want, got = expected["fingerprint"].get(part), found["fingerprint"].get(part)
        if want is not None and got is not None and want != got:
            problems.append(f"{description} ({part} fingerprint {got[:12]}, expected {want[:12]})")
    return problems


def head_differences(head: dict[str, Any], config: Any) -> list[str]:
    """Return, in words, how a classifier's ``config`` differs from the ``head`` that a posterior records."""
    problems = output_differences(head, config)
    pad = getattr(config, "pad_token_id", None)
    if "labels" in head and head.get("pad_token_id") not in (None, pad):
        problems.append(f"the pad_token_id {pad}, expected {head['pad_token_id']}")
    return problems


def output_differences(head: dict[str, Any], config: Any) -> list[str]:
    """Return, in words, why a classifier's outputs would mean something else than ``head`` records.

    Labels with transformers' default names match any names.
    """
    if "labels" not in head:
        return []
    labels, problems = head["labels"], []
    found_labels = label_names(config)
    unnamed = [f"LABEL_{index}" for index in range(len(labels))]
    equal = found_labels == labels or unnamed in (found_labels, labels)
    if not equal or len(found_labels) != len(labels):
        problems.append(f"the labels {found_labels}, expected {labels}")
    found, expected = (
        problem or ("regression" if len(labels) == 1 else "single_label_classification")
        for problem in (getattr(config, "problem_type", None), head.get("problem_type"))
    )
    if found != expected:
        problems.append(f"the problem_type {found!r}, expected {expected!r}")
    return problems


def adapter_config(model: nn.Module) -> dict[str, Any] | None:
    """Return the content of adapter_config.json, each module by its full name; None for a model without an adapter.

    Raises:
        ValueError: for a LoRA that posteriors do not support, naming the field, and for an adapter in a model that is
            not a ``PeftModel``.
    """
    refuse_bare_adapter(model)
    config = config_of_adapter(model)
    if config is None:
        return None
    content: dict[str, Any] = json_value({**config.to_dict(), "inference_mode": True}, lora_config.FILE)
    if not isinstance(config, LoraConfig):
        return content
    known = lora_config.FIELDS.keys() | lora_config.NEUTRAL | lora_config.IGNORED
    defaults = {field.name: field.default for field in dataclasses.fields(config)}  # of a field that is newer than this
    content = {name: value for name, value in content.items() if name in known or value != defaults.get(name)}
    located = json_value(lora_layers.names_of(cast(PeftModel, model)), lora_config.FILE)
    return lora_config.checked({**content, **located}, "the adapter of this model")


def _name(model: nn.Module, core: PreTrainedModel) -> str:
    adapter = config_of_adapter(model)
    name = None if adapter is None else adapter.base_model_name_or_path
    return str(name or getattr(core, "name_or_path", "") or compat.source_of(core.config))


def _base_parameters(model: nn.Module, layout: Layout) -> list[tuple[str, Any]]:
    """Return the frozen parameters under their names in the base model without its adapter.

    Buffers that a checkpoint holds belong to them, such as the bias of a router. Statistics of batch normalisation
    do, too, unless the members have statistics of their own.
    """
    random = set(layout.names)
    values = dict(model.named_parameters(remove_duplicate=False)) | running_statistics(model) | stored_buffers(model)
    random_ids = {id(values[name]) for name in layout.names}
    found = []
    for name, value in values.items():
        foreign = ".original_module." in name or ".modules_to_save." in name or ".lora_" in name
        if name in random or id(value) in random_ids or foreign:
            continue
        found.append((name.removeprefix("base_model.model.").replace(".base_layer.", "."), value))
    return found
