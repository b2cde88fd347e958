"""LoRA layers in a live model: check them against a posterior's tensors, build them with peft, list their names."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, cast

from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.layer import LoraLayer
from peft.utils import ModulesToSaveWrapper
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_bayes.core.layout import Layout, modules_of
from hf_bayes.posteriors import lora_config
from hf_bayes.posteriors.file_formats import MODEL_PREFIX as PREFIX
from hf_bayes.posteriors.tasks import PEFT_TASK_TYPES as TASKS

_WRAPPERS = (".base_layer", ".original_module")
_ADAPTER_PART = re.compile(r"\.(?:lora_\w+|modules_to_save)(?:\.|$)")
_FACTOR = re.compile(r"\.lora_(?:embedding_)?([AB])(?:\.|$)")


def build(model: nn.Module, config: Mapping[str, Any], layout: Layout, task: str, where: str) -> PeftModel:
    """Add a posterior's LoRA to its base model, after all names and sizes have been compared.

    Args:
        model: the base model, changed in place.
        config: ``lora_config.explicit``.
        layout: the posterior's parameters.
        task: the posterior's task.
        where: the posterior's name in an error.
    Raises:
        ValueError: if the base model lacks a module or parameter, or has one of another shape.
    """
    check_fits(model, layout, where)
    fields = {name: value for name, value in config.items() if name in lora_config.FIELDS}
    fields["target_modules"] = list(config["target_modules"])
    fields["modules_to_save"] = list(config["modules_to_save"] or ()) or None
    fields["exclude_modules"] = _excluded(model, config["target_modules"], where) or None
    fields["inference_mode"] = False
    if fields.get("task_type") != TASKS[task]:  # peft adds modules of its own for each task
        fields["task_type"] = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft warns of a base that it has already wrapped, which this is not
        return get_peft_model(model, LoraConfig(**fields), adapter_name=_adapter_name(layout))


def changed_by(config: Mapping[str, Any] | None) -> frozenset[str]:
    """Return the names of the base model's modules whose weights ``build`` changes, because of the adapter's start."""
    changes = config is not None and config.get("init_lora_weights") in lora_config.REPEATABLE
    return frozenset(config["target_modules"]) if config is not None and changes else frozenset()


def check_fits(model: nn.Module, layout: Layout, where: str) -> None:
    """Raise if the layers of a LoRA do not fit its base model, by name or by size."""
    modules = dict(model.named_modules())
    parameters = {name: tuple(value.shape) for name, value in model.named_parameters(remove_duplicate=False)}
    for name, shape in layout.named_shapes.items():
        factor = _FACTOR.search(name)
        if factor is None or name.endswith(".bias"):
            found = parameters.get(plain_name(name))
            problem, fits = "no such parameter" if found is None else f"shape {list(found)}", found == shape
        else:
            module = modules.get(name[len(PREFIX) : factor.start()])
            features = None if module is None else _features(module)
            problem = "no such parameter" if module is None else f"a module of {features} features"
            own = shape[1] if factor[1] == "A" else shape[0]
            fits = module is not None and (features is None or own == features[0 if factor[1] == "A" else 1])
        if not fits:
            raise ValueError(f"{where}: the base model has {problem} where {name} of shape {list(shape)} is expected")


def names_of(model: PeftModel) -> dict[str, Any]:
    """Return the fields of a live LoRA that locate it, by full module names, with its ranks and its alphas.

    The alphas give the scalings that the layers compute with, which peft's ``scale_layer`` and ``set_scale`` change.

    Raises:
        ValueError: if names alone cannot locate it, or if no alpha gives the scaling of a layer.
    """
    adapter, base = model.active_adapter, model.get_base_model()
    config = cast(LoraConfig, model.peft_config[adapter])
    layers = {name: layer for name, layer in modules_of(base, LoraLayer).items() if adapter in layer.r}
    wrappers = modules_of(base, ModulesToSaveWrapper)
    saved = sorted(name for name, wrapper in wrappers.items() if adapter in wrapper.modules_to_save)
    where = "the adapter of this model"
    _refuse_shadowed_copies(base, saved, where)
    return {
        "target_modules": sorted(layers),
        "exclude_modules": _excluded(base, layers, where) or None,
        "layers_to_transform": None,
        "layers_pattern": None,
        "modules_to_save": saved or None,
        "rank_pattern": lora_config.patterns({name: layer.r[adapter] for name, layer in layers.items()}, config.r),
        "alpha_pattern": lora_config.patterns(
            {name: _alpha_of(name, layer, adapter, config) for name, layer in layers.items()}, config.lora_alpha
        ),
    }


def _alpha_of(name: str, layer: LoraLayer, adapter: str, config: LoraConfig) -> float:
    """Return the alpha of a layer's scaling s = alpha / r, with rsLoRA alpha / sqrt(r), to the rounding of float64.

    Raises:
        ValueError: for a scaling of at most 0, and for one that differs from the scaling of a start such as PiSSA.
    """
    own: float = layer.lora_alpha[adapter]
    scaling: float = layer.scaling[adapter]
    divisor = math.sqrt(layer.r[adapter]) if config.use_rslora else layer.r[adapter]
    if scaling == own / divisor:
        return own
    if config.init_lora_weights in lora_config.REPEATABLE:
        # the start has subtracted its adapter from the base model, at the first scaling
        raise ValueError(
            f"{name}: its adapter has the scaling {scaling}, and init_lora_weights={config.init_lora_weights!r} began "
            f"with {own / divisor}: a posterior could not repeat this. Set lora_alpha or alpha_pattern in the "
            "LoraConfig instead of calling set_scale or scale_layer"
        )
    if not scaling > 0:
        raise ValueError(
            f"{name}: its adapter has the scaling {scaling}, expected more than 0. Give it another one (set_scale, "
            "unscale_layer), or leave the layer out of target_modules"
        )
    return float(scaling * divisor)


def _excluded(model: nn.Module, targets: Any, where: str) -> list[str]:
    """Return the modules to exclude by name, since peft matches endings of names."""
    excluded = lora_config.shadowed(targets, _module_names(model))
    if lost := lora_config.shadowed(excluded, targets):
        raise ValueError(
            f"{where}: peft cannot be given {lost[0]} by name and leave out {excluded}: give its modules other names"
        )
    return excluded


def _refuse_shadowed_copies(model: nn.Module, saved: Sequence[str], where: str) -> None:
    """Raise if peft, which matches endings of ``modules_to_save``, too, would copy other modules than it has copied."""
    own = set(saved)
    for name in _module_names(model):
        if name not in own and any(name[start:] in own for start in range(1, len(name))):
            raise ValueError(
                f"{where}: modules_to_save cannot name a module and leave out {name}, whose name ends alike: give the "
                "modules other names"
            )


def _module_names(model: nn.Module) -> list[str]:
    """Return the names of the modules without the parts that peft has added."""
    found = dict.fromkeys(name for name, _ in model.named_modules() if not _ADAPTER_PART.search(name))
    for wrapper in _WRAPPERS:
        found = dict.fromkeys(name.replace(wrapper, "") for name in found)
    return list(found)


def plain_name(name: str) -> str:
    """Return the parameter's name in the base model without its adapter."""
    name = re.sub(r"\.modules_to_save\.[^.]+\.", ".", name.removeprefix(PREFIX))
    return name.replace(".base_layer.", ".")


def _features(module: nn.Module) -> tuple[int, int] | None:
    """Return (in, out) of a layer that gets a LoRA; None for a kind of layer that is unknown here."""
    match module:
        case Conv1D():
            return module.weight.shape[0], module.weight.shape[1]
        case nn.Embedding():
            return module.num_embeddings, module.embedding_dim
        case nn.Module(in_features=int(num_inputs), out_features=int(num_outputs)):
            return num_inputs, num_outputs
    return None


def _adapter_name(layout: Layout) -> str:
    """Return the adapter's name within the parameter names, such as "default"."""
    names = {
        match[1] for name in layout.names if (match := re.search(r"\.(?:lora_[AB]|modules_to_save)\.([^.]+)\.", name))
    }
    return names.pop() if len(names) == 1 else "default"
