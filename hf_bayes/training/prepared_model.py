"""Make the model as TRL's trainers do: load it by its name, and add the adapter of a ``peft_config``."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from peft import PeftConfig, PeftModel, get_peft_model
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoProcessor,
    PreTrainedModel,
    set_seed,
)
from transformers.pytorch_utils import Conv1D

from hf_bayes.models.base import BayesianModel
from hf_bayes.models.loading.base_model import core_of, refuse_foreign
from hf_bayes.models.loading.checkpoint_weights import load_pretrained, warn_of_random_weights, warn_of_unused_weights
from hf_bayes.models.loading.recognition import task_of
from hf_bayes.models.restoration import BaseState, unwrapped
from hf_bayes.posteriors.hub import is_place
from hf_bayes.posteriors.lora_config import REPEATABLE
from hf_bayes.posteriors.tasks import TASKS


@contextmanager
def prepared(
    model: Any, args: Any, peft_config: PeftConfig | None, kwargs: dict[str, Any], *, rewards: bool = False
) -> Iterator[Any]:
    """Yield the model to attach. If the block raises an error, the adapter is removed from a model that was passed.

    The random numbers are those of TRL, so the same seed gives the same adapter. On a quantised base TRL rounds the
    adapter to bfloat16. Here it stays float32, because chains are float32.

    Args:
        model: a model, or the name or path of one.
        args: the trainer's arguments; for a named model ``model_init_kwargs`` and ``trust_remote_code`` are used.
        peft_config: the adapter to add; None leaves the model unchanged.
        kwargs: the other arguments for the host trainer's ``__init__``. For a named model,
            ``quantization_config`` is removed, and its tokenizer is added if there is none.
        rewards: whether a named model is loaded with a head of one output.
    """
    named = is_place(model)
    if peft_config is not None:
        _refuse_adapter(model, peft_config)
    settings = getattr(args, "model_init_kwargs", None)
    if named or peft_config is not None:
        set_seed(args.seed)
    if named:
        model = _load(os.fspath(model), args, kwargs, rewards=rewards)
        args.model_init_kwargs = None  # they have been used, and TRL would warn that they are ignored
    before = BaseState(model, _changed_by(peft_config, model))
    try:
        if peft_config is not None:
            model = get_peft_model(model, peft_config)
        yield model
    except BaseException:
        if peft_config is not None and isinstance(model, PeftModel):
            unwrapped(model)
        before.restore()
        raise
    finally:
        if named:
            args.model_init_kwargs = settings


def _changed_by(peft_config: Any, model: Any) -> list[str]:
    """Return the paths of the linear layers if the adapter's start changes the weights of some; else nothing."""
    if getattr(peft_config, "init_lora_weights", None) not in REPEATABLE:
        return []
    return [path for path, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)]


def _refuse_adapter(model: Any, peft_config: Any) -> None:
    if not isinstance(peft_config, PeftConfig):
        raise ValueError(f"peft_config must be a config of peft, such as LoraConfig(...), got {peft_config!r}")
    if isinstance(model, PeftModel | BayesianModel):
        raise ValueError(
            f"peft_config is given with a {type(model).__name__}, expected a transformers model without an adapter. "
            "Leave peft_config out to sample the adapter that is there, or merge it first (merge_and_unload)"
        )


def _load(name: str, args: Any, kwargs: dict[str, Any], *, rewards: bool) -> PreTrainedModel:
    """Load a model by its name, with the class that its config names, in float32 unless told otherwise.

    A reward model is a classifier with one output, whatever the config names.
    """
    settings = dict(args.model_init_kwargs or {})
    quantization = kwargs.pop("quantization_config", None)
    if quantization is not None:
        if "quantization_config" in settings:
            raise ValueError("quantization_config is given twice, also in model_init_kwargs: leave one of them out")
        settings["quantization_config"] = quantization
    settings.setdefault("dtype", torch.float32)
    settings.setdefault("trust_remote_code", getattr(args, "trust_remote_code", False))
    if kwargs.get("processing_class") is None:
        kwargs["processing_class"] = AutoProcessor.from_pretrained(name, **_source(settings))
    if rewards:
        loaded = load_pretrained(AutoModelForSequenceClassification, name, num_labels=1, **settings)
        warn_of_random_weights(loaded, name)
        warn_of_unused_weights(loaded, name)
        return loaded.model
    found: PreTrainedModel = _class_of(name, settings).from_pretrained(name, **settings)
    return found


def _class_of(name: str, settings: Mapping[str, Any]) -> Any:
    """Return the class that the config of a named model names."""
    names = AutoConfig.from_pretrained(name, **_source(settings)).architectures or [""]
    return getattr(transformers, names[0], AutoModelForCausalLM)


def _source(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: settings[key] for key in ("trust_remote_code", "revision") if key in settings}


def unit_of(model: Any, args: Any, *, rewards: bool) -> str:
    """Return the unit of a likelihood term (``Task.unit``) of a model, or of the model that a name will load.

    Args:
        model, args, rewards: as for ``prepared``.
    """
    if not is_place(model):
        core = core_of(model)
        refuse_foreign(model, core)
        return task_of(core).unit
    if rewards:
        return TASKS["sequence_classification"].unit
    trusted = {"trust_remote_code": getattr(args, "trust_remote_code", False)}
    kind = _class_of(os.fspath(model), trusted | dict(getattr(args, "model_init_kwargs", None) or {})).__name__
    return next((task.unit for task in TASKS.values() if kind.endswith(task.suffix)), TASKS["causal_lm"].unit)
