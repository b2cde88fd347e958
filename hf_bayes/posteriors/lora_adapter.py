"""Plain peft LoRA adapters as files: their keys, and what makes several of them one ensemble. peft is not needed."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_bayes.posteriors import hub, lora_config, storage, tasks
from hf_bayes.posteriors.storage.listing import shown
from hf_bayes.posteriors.storage.plain_values import plain

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER = "adapter_model.safetensors"
TASKS = {task.name: task.peft for task in tasks.TASKS.values()}
"""Our tasks and peft's names of them, where it has one."""

# Fields of adapter_config.json in which the adapters of one ensemble may differ: the forward pass of a loaded adapter
# does not depend on them.
_INDIFFERENT = {"inference_mode", "lora_dropout", "init_lora_weights", "peft_version"}
_FACTOR = re.compile(r"\.(lora_A|lora_B|lora_embedding_A|lora_embedding_B)(?=\.|$)")


def adapter_key(name: str) -> str:
    """A parameter's key in an adapter file: peft leaves out the adapter's name and its own wrappers.

    ``x.lora_A.default.weight -> x.lora_A.weight``;  ``x.modules_to_save.default.weight -> x.weight``.
    """
    name = re.sub(_FACTOR.pattern + r"\.[^.]+", r".\1", name)
    return re.sub(r"\.modules_to_save\.[^.]+\.", ".", name)


def parameter_name(key: str, modules_to_save: Sequence[str]) -> str:
    """The inverse of ``adapter_key`` for peft's adapter named "default"."""
    if ".lora_" in key:
        return _FACTOR.sub(r".\1.default", key)
    prefix = "base_model.model."
    parts = key.removeprefix(prefix).split(".")
    for length in range(1, len(parts)):
        module = ".".join(parts[:length])
        if module.endswith(tuple(modules_to_save)):  # as peft matches: "norm" means input_layernorm, too
            rest = ".".join(parts[length:])
            return f"{key[: len(key) - len(rest) - 1]}.modules_to_save.default.{rest}"
    return key


def partner_key(key: str) -> str | None:
    """The other factor of a LoRA product; None for a tensor that is no factor."""
    found = _FACTOR.search(key)
    if found is None or key.endswith(".bias"):
        return None
    swapped = found[1][:-1] + ("B" if found[1].endswith("A") else "A")
    return f"{key[: found.start()]}.{swapped}{key[found.end() :]}"


def plain_adapter_config(values: Mapping[str, Any]) -> dict[str, Any]:
    """The content of ``adapter_config.json``: plain values of supported fields, ready for inference.

    Raises:
        ValueError: if it is not a LoRA's that posteriors support, naming the field.
    """
    return {**lora_config.checked(plain(values, ADAPTER_CONFIG)), "inference_mode": True}


@dataclass(frozen=True)
class Adapter:
    """A plain peft adapter in a folder or a repository.

    Attributes:
        source: where it came from.
        config: the content of ``adapter_config.json``.
        tensors: by parameter name, in float32 (float64 where stored so).
        stored: dtype of each key of the file.
        fingerprint: of the base model, where the adapter belongs to a posterior.
    """

    source: str
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    stored: dict[str, torch.dtype]
    fingerprint: dict[str, str | None] | None

    @classmethod
    def read(cls, source: str | os.PathLike[str]) -> Adapter:
        """Read it from a directory or the Hub.

        Raises:
            OSError, ValueError: if there is none, or it is no LoRA in safetensors.
        """
        directory = hub.fetch(source, patterns=(ADAPTER_CONFIG, ADAPTER))
        for name in (ADAPTER_CONFIG, ADAPTER):
            if not (directory / name).is_file():
                raise ValueError(
                    f"{source} holds no {name}: it is no peft adapter in safetensors. Pickled adapters "
                    "(adapter_model.bin) are not read; save it with a recent peft"
                )
        config = storage.read_file(directory, ADAPTER_CONFIG)
        if config.get("peft_type") != "LORA" or config.get("use_dora"):
            kind = "DoRA" if config.get("use_dora") else config.get("peft_type")
            raise ValueError(f"{source} is a {kind!s:.100} adapter: an ensemble can be made of LoRA adapters")
        for field in ("trainable_token_indices", "target_parameters"):
            if config.get(field):
                raise ValueError(
                    f"{source} has {field}={config[field]!r:.100} beside its LoRA on layers: members have factors of "
                    "layers and modules_to_save only"
                )
        config = lora_config.checked(config, f"{source}/{ADAPTER_CONFIG}")
        modules = config.get("modules_to_save") or []
        stored = storage.read_file(directory, ADAPTER)
        odd = sorted(name for name, tensor in stored.items() if not tensor.is_floating_point())
        if empty := [name for name, tensor in stored.items() if not tensor.numel()]:
            raise ValueError(f"{source}/{ADAPTER}: tensors without any number: {shown(empty)}")
        if odd or not stored:
            raise ValueError(f"{source}/{ADAPTER}: expected floating-point tensors, got {odd or 'none'}")
        tensors = {
            parameter_name(key, modules): tensor if tensor.dtype == torch.float64 else tensor.float()
            for key, tensor in sorted(stored.items())
        }
        dtypes = {key: tensor.dtype for key, tensor in stored.items()}
        return cls(str(source), config, tensors, dtypes, _fingerprint_near(directory))

    def task(self) -> str:
        """Our name of its task."""
        kind = self.config.get("task_type")
        found = next((ours for ours, theirs in TASKS.items() if kind is not None and theirs == kind), None)
        if found is None:
            raise ValueError(f"{self.source}: task_type is {kind!r}: pass task= one of {', '.join(TASKS)}")
        return found

    def check_equal_kind(self, other: Adapter) -> None:
        """Require one base model, configuration, keys, shapes and dtypes.

        Raises:
            ValueError: naming what differs, and both values.
        """
        if self.fingerprint and other.fingerprint and self.fingerprint != other.fingerprint:
            raise ValueError(
                f"adapters of different base models: {self.source} has fingerprint {self.fingerprint}, {other.source} "
                f"has {other.fingerprint}. An ensemble shares one base"
            )
        mine_only, theirs_only = (
            sorted(set(self.stored) - set(other.stored)),
            sorted(set(other.stored) - set(self.stored)),
        )
        if mine_only or theirs_only:
            raise ValueError(
                f"{other.source} misses the tensors {shown(mine_only)} of {self.source} and adds {shown(theirs_only)}"
            )
        configs = [_resolved(adapter) for adapter in (self, other)]
        for key in ("base_model_name_or_path", "revision", *sorted(set().union(*configs))):
            mine, theirs = (_comparable(config.get(key)) for config in configs)
            if key not in _INDIFFERENT and mine != theirs:
                what = (
                    "different base models" if key in ("base_model_name_or_path", "revision") else "different adapters"
                )
                raise ValueError(f"{what}: {key} is {mine!r} in {self.source}, {theirs!r} in {other.source}")
        for name, tensor in self.tensors.items():
            if tensor.shape != other.tensors[name].shape:
                raise ValueError(
                    f"{name}: shape {list(tensor.shape)} in {self.source}, "
                    f"{list(other.tensors[name].shape)} in {other.source}"
                )
        for key, dtype in self.stored.items():
            if dtype != other.stored[key]:
                raise ValueError(f"{key}: dtype {dtype} in {self.source}, {other.stored[key]} in {other.source}")


def _fingerprint_near(directory: Path) -> dict[str, str | None] | None:
    """The base's fingerprint, if the adapter is the root or a member of a posterior."""
    posterior = [directory.parent.parent] if directory.parent.name == "members" else []
    for place in (directory, *posterior):
        if (place / "posterior_config.json").is_file():
            base_model = storage.read_file(place, "posterior_config.json").get("base_model")
            fingerprint = base_model.get("fingerprint") if isinstance(base_model, dict) else None
            return fingerprint if isinstance(fingerprint, dict) else None
    return None


def _resolved(adapter: Adapter) -> dict[str, Any]:
    """The configuration with modules by name, so that equal choices compare equal; unchanged if it has a fault."""
    try:
        return lora_config.from_tensors(adapter.config, {n: tuple(t.shape) for n, t in adapter.tensors.items()})
    except ValueError:
        return adapter.config


def _comparable(value: Any) -> Any:
    """Order in lists of modules means nothing; nor does a field that an older peft did not know."""
    return sorted(value, key=repr) if isinstance(value, list) else (value or None)
