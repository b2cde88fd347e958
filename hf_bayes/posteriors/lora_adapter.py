"""One plain peft LoRA adapter as files in a folder or a repository. peft itself is not needed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_bayes.posteriors import hub, lora_config, storage
from hf_bayes.posteriors.config import CONFIG
from hf_bayes.posteriors.file_formats import ADAPTER, ADAPTER_CONFIG
from hf_bayes.posteriors.lora_keys import copied_key, parameter_name
from hf_bayes.posteriors.sidecars import NAMES, Sidecars, sidecars_in
from hf_bayes.posteriors.storage.listing import shown
from hf_bayes.posteriors.tasks import PEFT_TASK_TYPES


@dataclass(frozen=True)
class Adapter:
    """A plain peft LoRA adapter in a folder or a repository.

    Attributes:
        source: the folder or repository.
        config: the content of ``adapter_config.json``.
        tensors: by parameter name, in float32 (float64 where stored so).
        stored: the dtype of each key of the file.
        fingerprint: the fingerprint of the base model, if the adapter belongs to a posterior.
        sidecars: the tokenizer and other files beside it.
    """

    source: str
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    stored: dict[str, torch.dtype]
    fingerprint: dict[str, str | None] | None
    sidecars: Sidecars

    @classmethod
    def read(cls, source: str | os.PathLike[str]) -> Adapter:
        """Read an adapter from a directory or the Hub.

        Raises:
            OSError, ValueError: if there is no adapter, or it is not a LoRA in safetensors.
        """
        directory = hub.fetch(source, patterns=(ADAPTER_CONFIG, ADAPTER, *NAMES))
        for name in (ADAPTER_CONFIG, ADAPTER):
            if not (directory / name).is_file():
                raise ValueError(
                    f"{source} holds no {name}: it is not a peft adapter in safetensors. Pickled adapters "
                    "(adapter_model.bin) are not read; save it with a recent peft"
                )
        config = _supported(storage.read_file(directory, ADAPTER_CONFIG), source)
        stored = storage.read_file(directory, ADAPTER)
        stored = {key: tensor for key, tensor in stored.items() if copied_key(key) not in stored}
        _check_tensors(stored, source)
        modules = config.get("modules_to_save") or []
        tensors = {
            parameter_name(key, modules): tensor if tensor.dtype == torch.float64 else tensor.float()
            for key, tensor in sorted(stored.items())
        }
        dtypes = {key: tensor.dtype for key, tensor in stored.items()}
        return cls(str(source), config, tensors, dtypes, _fingerprint_near(directory), _sidecars_of(directory))

    def task(self) -> str:
        """Return the task as a posterior names it.

        Raises:
            ValueError: if the adapter names no task that posteriors support.
        """
        kind = self.config.get("task_type")
        found = next((ours for ours, theirs in PEFT_TASK_TYPES.items() if kind is not None and theirs == kind), None)
        if found is None:
            raise ValueError(f"{self.source}: task_type is {kind!r}: pass task= one of {', '.join(PEFT_TASK_TYPES)}")
        return found


def _supported(config: Mapping[str, Any], source: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the fields of a LoRA that can be a member.

    Raises:
        ValueError: naming the field that members do not support.
    """
    if config.get("peft_type") != "LORA" or config.get("use_dora"):
        kind = "DoRA" if config.get("use_dora") else config.get("peft_type")
        raise ValueError(f"{source} is a {kind!s:.100} adapter: an ensemble can be made of LoRA adapters")
    for field in ("trainable_token_indices", "target_parameters"):
        if config.get(field):
            raise ValueError(
                f"{source} has {field}={config[field]!r:.100} beside its LoRA on layers: members have factors of "
                "layers and modules_to_save only"
            )
    return lora_config.checked(config, f"{source}/{ADAPTER_CONFIG}")


def _check_tensors(stored: Mapping[str, Tensor], source: str | os.PathLike[str]) -> None:
    odd = sorted(name for name, tensor in stored.items() if not tensor.is_floating_point())
    if empty := [name for name, tensor in stored.items() if not tensor.numel()]:
        raise ValueError(f"{source}/{ADAPTER}: tensors without any number: {shown(empty)}")
    if odd or not stored:
        raise ValueError(f"{source}/{ADAPTER}: expected floating-point tensors, got {odd or 'none'}")


def _sidecars_of(directory: Path) -> Sidecars:
    """Return the tokenizer and other files beside an adapter."""
    try:
        return Sidecars({name: storage.read_bytes(directory, name) for name in sidecars_in(directory)})
    except ValueError as error:
        raise ValueError(f"{directory}: {error}. Remove this file of the tokenizer, or save it again") from error


def _fingerprint_near(directory: Path) -> dict[str, str | None] | None:
    """Return the fingerprint of the base model, if the adapter is the root or a member of a posterior."""
    posterior = [directory.parent.parent] if directory.parent.name == "members" else []
    for place in (directory, *posterior):
        if (place / CONFIG).is_file():
            match storage.read_file(place, CONFIG):
                case {"base_model": {"fingerprint": dict(fingerprint)}}:
                    return fingerprint
            return None
    return None
