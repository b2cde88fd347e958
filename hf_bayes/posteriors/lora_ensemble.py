"""A deep ensemble of LoRA adapters that were trained elsewhere, as the parts of a posterior."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hf_bayes.core.layout import Layout
from hf_bayes.distributions.approximations import Draws
from hf_bayes.posteriors import lora_config
from hf_bayes.posteriors.config import PosteriorConfig
from hf_bayes.posteriors.directory import Parts
from hf_bayes.posteriors.hub import is_place
from hf_bayes.posteriors.lora_adapter import Adapter
from hf_bayes.posteriors.sidecars import Sidecars
from hf_bayes.posteriors.storage.listing import shown

# Fields of adapter_config.json in which the adapters of one ensemble may differ: the forward pass of a loaded adapter
# does not depend on them.
_INDIFFERENT = {"inference_mode", "lora_dropout", "peft_version"}
_ADVICE = (
    ". Such a start can change the weights of the base model, so one value is expected in all adapters: convert with "
    "save_pretrained(..., path_initial_model_for_weight_conversion=...) of peft, or leave one out"
)
_BASE = ("base_model_name_or_path", "revision")


def ensemble_of(
    directories: Sequence[str | os.PathLike[str]],
    *,
    base_fingerprint: Mapping[str, str | None] | None = None,
    task: str | None = None,
) -> Parts:
    """Return the parts of a posterior whose draws are these adapters, each a chain of its own.

    Args:
        directories: adapter folders or Hub ids, at least one.
        base_fingerprint: the fingerprint of the base model, for the check at loading.
        task: the task, where ``adapter_config.json`` does not name it.
    Raises:
        ValueError: if an adapter differs in configuration, base, keys, shapes or dtype, naming both.
    """
    if is_place(directories):
        raise ValueError(f"from_adapters takes a list of adapters, got one path: [{os.fspath(directories)!r}]")
    if not directories:
        raise ValueError("from_adapters got 0 directories: give at least one adapter")
    adapters = [Adapter.read(directory) for directory in directories]
    first = adapters[0]
    known = first
    for other in adapters[1:]:
        check_same_kind(first, other)
        _check_same_fingerprint(known, other)
        known = known if known.fingerprint else other
    layout = Layout(tuple(first.tensors), tuple(tuple(tensor.shape) for tensor in first.tensors.values()))
    theta = torch.stack([layout.flatten(adapter.tensors) for adapter in adapters])
    fingerprint = base_fingerprint or known.fingerprint
    config = _config(first, layout, len(adapters), fingerprint=fingerprint, task=task or first.task())
    adapter_config = lora_config.from_tensors(first.config, layout.named_shapes, where=first.source)
    # tokenizers that differ: which one a prediction should use is not known, the base model has one
    sidecars = first.sidecars if all(other.sidecars == first.sidecars for other in adapters) else Sidecars()
    return Parts(Draws(theta, torch.arange(len(adapters))), config, adapter_config, sidecars=sidecars)


def _config(
    first: Adapter, layout: Layout, num_members: int, *, fingerprint: Mapping[str, str | None] | None, task: str
) -> PosteriorConfig:
    fingerprint = fingerprint or {"weights": None, "config": None, "tokenizer": None}
    return PosteriorConfig(
        task=task,
        method={"name": "ensemble", "num_chains": num_members, "draws_per_chain": 1},
        approximation="draws",
        parameters=[[name, list(shape)] for name, shape in layout.named_shapes.items()],
        num_members=num_members,
        subspace="trainable",
        prior={"name": "unknown"},
        num_data=None,
        data_unit="unknown",
        base_model={
            "name_or_path": first.config.get("base_model_name_or_path"),
            "revision": first.config.get("revision"),
            "dtype": None,
            "fingerprint": dict(fingerprint),
        },
        seed=None,
        diagnostics={"converged": None, "verdict": f"{num_members} adapters trained elsewhere: not assessed"},
    )


def check_same_kind(first: Adapter, other: Adapter) -> None:
    """Check that two adapters have one base model, configuration, keys, shapes and dtypes.

    Raises:
        ValueError: naming the first difference, and both values.
    """
    _check_same_fingerprint(first, other)
    missing, added = sorted(set(first.stored) - set(other.stored)), sorted(set(other.stored) - set(first.stored))
    if missing or added:
        raise ValueError(f"{other.source} lacks the tensors {shown(missing)} of {first.source} and adds {shown(added)}")
    _check_same_config(first, other)
    for name, tensor in first.tensors.items():
        if tensor.shape != other.tensors[name].shape:
            raise ValueError(
                f"{name}: shape {list(tensor.shape)} in {first.source}, "
                f"{list(other.tensors[name].shape)} in {other.source}"
            )
    for key, dtype in first.stored.items():
        if dtype != other.stored[key]:
            raise ValueError(f"{key}: dtype {dtype} in {first.source}, {other.stored[key]} in {other.source}")


def _check_same_fingerprint(first: Adapter, other: Adapter) -> None:
    if first.fingerprint and other.fingerprint and first.fingerprint != other.fingerprint:
        raise ValueError(
            f"adapters of different base models: {first.source} has fingerprint {first.fingerprint}, {other.source} "
            f"has {other.fingerprint}. An ensemble shares one base"
        )


def _check_same_config(first: Adapter, other: Adapter) -> None:
    configs = [_resolved(adapter) for adapter in (first, other)]
    for key in (*_BASE, *sorted(set().union(*configs))):
        one, two = (_comparable(config.get(key)) for config in configs)
        if key not in _INDIFFERENT and one != two:
            what = "different base models" if key in _BASE else "different adapters"
            advice = _ADVICE if key == "init_lora_weights" else ""
            raise ValueError(f"{what}: {key} is {one!r} in {first.source}, {two!r} in {other.source}{advice}")


def _resolved(adapter: Adapter) -> dict[str, Any]:
    """Return the configuration with modules by name, so that equal choices are equal. A faulty one is unchanged."""
    try:
        return lora_config.from_tensors(adapter.config, {n: tuple(t.shape) for n, t in adapter.tensors.items()})
    except ValueError:
        return adapter.config


def _comparable(value: Any) -> Any:
    """Return a value without differences that mean nothing: the order of a list, and fields that an old peft lacks."""
    return sorted(value, key=repr) if isinstance(value, list) else (value or None)
