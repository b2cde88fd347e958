"""The part of a model's configuration that its outputs depend on, which the fingerprint of a base model covers.

A field is left out if a network in evaluation mode cannot depend on it, or if a posterior states it elsewhere:

1. a rate of dropout: a number whose name says so (``attention_dropout``, ``resid_pdrop``, ``layerdrop``,
   ``drop_path_rate``), or the size of a router's noise in training (``router_jitter_noise``). A switch such as ESM's
   ``token_dropout``, which rescales embeddings in evaluation, stays in;
2. other settings of training: masks of SpecAugment, weights of losses, label smoothing,
   checkpointing of activations;
3. the distribution of initial weights (``initializer_range``): weights have a fingerprint of their own;
4. settings of a call (``use_cache``, ``output_attentions``, ``return_dict``) and of a kernel (attention, experts);
5. names, versions and dtypes, labels and special tokens: the posterior's ``head`` and ``dtype`` record these.

All other fields count, also in nested configurations. An unknown field counts: a refusal can be overridden, a wrong
answer cannot be seen.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from hf_bayes.core.number_checks import is_number

_RATE = re.compile(r"dropout|pdrop|layerdrop|droppath|(?:^|_)drop_(?:\w+_)?rate|jitter_noise")
_TRAINING = re.compile(
    r"(?:^|_)(?:apply_spec_augment|mask_(?:time|feature)_(?:prob|length|min_masks)|label_smoothing"
    r"|loss_(?:coef|coefficient|weight)|(?:gradient|activation)_checkpointing"
    r"|initializer_(?:range|factor|std)|init_(?:xavier_)?std)$"
)
_STATED = frozenset({
    "_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures",
    "id2label", "label2id", "num_labels", "problem_type", "pad_token_id", "bos_token_id", "eos_token_id",
    "use_cache", "output_attentions", "output_hidden_states", "output_router_logits", "return_dict",
    "chunk_size_feed_forward", "torchscript",
    "_attn_implementation", "_experts_implementation", "attn_implementation", "experts_implementation",
})  # fmt: skip


def evaluation_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of ``PreTrainedConfig.to_dict()`` that decide what the network computes in evaluation mode."""
    return {
        str(name): evaluation_fields(value) if isinstance(value, Mapping) else value
        for name, value in config.items()
        if not _is_left_out(str(name), value)
    }


def _is_left_out(name: str, value: Any) -> bool:
    return name in _STATED or bool(_TRAINING.search(name)) or is_dropout_rate(name, value)


def is_dropout_rate(name: str, value: Any) -> bool:
    """Return whether this field of a config is a rate of dropout or the noise of a router, which may be None."""
    return (value is None or is_number(value)) and bool(_RATE.search(name))
