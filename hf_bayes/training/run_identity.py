"""The identity of a run: all that decides its target distribution, or the estimates that its method makes.

Checkpoints are bound to it: only a run with the same identity resumes from them.

``identity`` returns it as one flat, JSON-ready object. A checkpoint stores it beside the settings of the run, and a run
that resumes must find the same, entry by entry; what differs is named ("adapter.lora_alpha: saved 4, now 64").

Bound, beside the settings of ``resuming.RunCheckpoints.settings``:

* ``base.*``: class, frozen weights and persistent buffers (hashes);
* ``config.*``: the base model's configuration, without the fields that do not change what the model computes in
  training (``_NO_FUNCTION``);
* ``adapter.*``: peft's configuration, and the scalings that the layers apply;
* ``dropout.*``: every probability above 0, by module;
* ``likelihood``, ``task``, ``tokenizer``, and for classifiers the padding token, by which some find a row's end;
* ``precision.*``: dtype of the base, of theta, and of autocast;
* ``data.*`` (``data.fingerprint``), and ``heldout.*`` where a method fits its prior by held-out rows;
* ``micro_batches`` where they are more than a way to sum (``split_matters``).

Not bound, because the law of the draws is the same and only rounding, or which random numbers are used, differs:

* the number of processes, and micro-batches elsewhere: dropout masks are then other draws of the same law;
* the implementation of attention, activation checkpointing, TF32, ``members_per_pass``, the trunk and its memory;
* workers of a data set with a length.

Not bound, because the draws do not depend on it: logging, evaluation, saving and ``map_updates``; the name of the base
model, whose weights count; initial values of random parameters, which the checkpoint replaces. If a prior is centred at
these values, they are bound.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from peft.tuners.lora import LoraLayer
from torch import nn

from hf_bayes.core.compat import BATCH_NORM, DROPOUT
from hf_bayes.core.config import MethodConfig
from hf_bayes.core.hashing import fingerprint_tensors
from hf_bayes.core.layout import modules_of
from hf_bayes.core.number_checks import is_number
from hf_bayes.models.base import BayesianModel
from hf_bayes.models.loading import base_model
from hf_bayes.training.data.fingerprint import DIGITS

_NO_FUNCTION = frozenset({
    "_name_or_path", "transformers_version", "architectures", "auto_map",  # names
    "dtype", "torch_dtype",  # bound as precision
    "problem_type",  # bound as the likelihood
    "id2label", "label2id", "bos_token_id", "eos_token_id", "pad_token_id",  # names, and tokens that Trainer sets
    "use_cache", "return_dict", "output_attentions", "output_hidden_states", "output_router_logits",  # of a call
    "_attn_implementation", "attn_implementation", "_experts_implementation", "chunk_size_feed_forward",  # rounding
    "initializer_range", "initializer_factor",  # of weights that are bound themselves
})  # fmt: skip
"""Fields of a configuration that leave the function of a model in training as it is, or are bound elsewhere."""

_NO_ADAPTER = frozenset({
    "base_model_name_or_path", "revision", "peft_version", "auto_mapping", "task_type", "inference_mode",  # names
    "init_lora_weights", "loftq_config", "corda_config", "eva_config", "lora_ga_config",  # of weights that are bound
    "megatron_core",
})  # fmt: skip
"""Fields of an adapter's configuration that say where it began or belongs, and not what it computes."""


def identity(
    model: BayesianModel,
    *,
    tokenizer: Any,
    mixed_precision: str,
    data: Mapping[str, Any],
    heldout: Mapping[str, Any] | None,
    micro_batches: int | None,
) -> dict[str, Any]:
    """Return the identity that a checkpoint is bound to, as {dotted name: JSON value}.

    Args:
        model: attached.
        tokenizer: a tokenizer, or a processor; None where there is none.
        mixed_precision: the setting of accelerate, "no" or "bf16".
        data: the fingerprint of the training rows (``data.fingerprint``), and all else that is known of them.
        heldout: the same of the held-out rows by which a method fits; None without such rows.
        micro_batches: the number of micro-batches in an update, over all processes that share a chain; None where the
            split does not matter.
    """
    groups: dict[str, Mapping[str, Any]] = {
        "base": _describe_base(model),
        "config": _flat(model.core.config.to_dict(), without=_NO_FUNCTION),
        "adapter": _describe_adapter(model.model),
        "dropout": dropout_of(model.model),
        "precision": {
            "base": str(model.core.dtype).removeprefix("torch."),
            "theta": str(model.theta.dtype).removeprefix("torch."),
            "autocast": mixed_precision,
        },
        "data": data,
        "heldout": heldout or {},
    }
    found = {f"{group}.{name}": value for group, values in groups.items() for name, value in values.items()}
    own = base_model.tokenizer_in(tokenizer)
    found |= {
        "task": model.task,
        "likelihood": _describe_likelihood(model),
        "tokenizer": None if own is None else base_model.fingerprint_tokenizer(own)[:DIGITS],
    }
    if not model.core.can_generate():  # Trainer gives the model the tokenizer's, if the tokenizer has one
        padding = getattr(own, "pad_token_id", None)
        found["pad_token_id"] = getattr(model.core.config, "pad_token_id", None) if padding is None else padding
    return found | ({} if micro_batches is None else {"micro_batches": micro_batches})


def _describe_likelihood(model: BayesianModel) -> str:
    """Return the name of the likelihood; of a user's likelihood, with its fields."""
    own = model.likelihood.config
    return model.likelihood.name if own is None else json.dumps(own.to_dict(), sort_keys=True)


def split_matters(method: MethodConfig, model: nn.Module, *, stream: bool, private: bool, packs: bool) -> bool:
    """Return whether another division of an update into micro-batches changes more than the order of a sum.

    It is where a method compares micro-batches: it estimates the variance of its gradient or of an energy between them.
    It is where their size decides which rows are drawn, as for private rows. It is where rows of a micro-batch meet: in
    a collator that packs rows, and in batch normalisation. And a stream's diagnostics look at its first micro-batch.

    Everywhere else ("8 x 1 for 4 x 2") sums round in another way, and dropout masks are other draws of the same law.
    """
    meets = bool(modules_of(model, BATCH_NORM))
    needs = method.requirements
    compares = needs.gradient_variance == "needed" or needs.min_batches > 1
    return compares or private or stream or packs or meets


def dropout_of(model: nn.Module) -> dict[str, float]:
    """Return {module or module.attribute: probability} of all dropout with a probability above 0.

    A module of torch has its ``p``. Attention that drops out by a function, and paths that are dropped whole, keep the
    probability in an attribute named after it.
    """
    found: dict[str, float] = {}
    dropout = modules_of(model, DROPOUT)
    for path, module in model.named_modules():
        if path in dropout:
            found[path] = float(dropout[path].p)
            continue
        for name, value in vars(module).items():
            if "drop" in name and is_number(value):
                found[f"{path}.{name}"] = float(value)
    return {name: p for name, p in found.items() if p > 0}


def _describe_base(model: BayesianModel) -> dict[str, Any]:
    buffers = model.model.state_dict().keys() - dict(model.model.named_parameters(remove_duplicate=False)).keys()
    persistent = ((name, value) for name, value in model.model.named_buffers() if name in buffers)
    return {
        "class": type(model.core).__name__,
        "weights": base_model.fingerprint_weights(model.model, model.layout)[:DIGITS],
        "buffers": fingerprint_tensors(persistent)[:DIGITS],
    }


def _describe_adapter(model: nn.Module) -> dict[str, Any]:
    config = base_model.adapter_config(model)
    if config is None:
        return {}
    layers = modules_of(model, LoraLayer).values()
    scalings = {layer.scaling[name] for layer in layers for name in layer.active_adapters if name in layer.scaling}
    return {**_flat(config, without=_NO_ADAPTER), "scaling": sorted(scalings)}


def _flat(values: Mapping[str, Any], *, without: frozenset[str] = frozenset(), prefix: str = "") -> dict[str, Any]:
    """Return {dotted name: plain value}. Nested objects are opened; lists are values."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if name in without:
            continue
        if isinstance(value, Mapping) and value:
            found |= _flat(value, without=without, prefix=f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = _plain(value)
    return found


def _plain(value: Any) -> Any:
    """Return a value of a configuration as JSON. Values that JSON lacks (infinities, dtypes) become text."""
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else str(value)
        case set() | frozenset():
            return sorted(map(str, value))
        case list() | tuple():
            return [_plain(item) for item in value]
        case Mapping():
            return {str(key): _plain(item) for key, item in value.items()}
    return str(value)
