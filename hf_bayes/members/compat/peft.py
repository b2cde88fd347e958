"""The names of peft that the package reads outside of its documented interface."""

from __future__ import annotations

from hf_bayes.core.compat import PrivateName

_LORA = "peft.tuners.lora.layer.LoraLayer"

NAMES = (
    PrivateName(_LORA, "adapter_layer_names", None, "read"),
    PrivateName(_LORA, "lora_variant", None, "read"),
)
"""The names of peft."""
