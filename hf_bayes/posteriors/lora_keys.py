"""Names of LoRA tensors: the key in an adapter file <-> the parameter name in a live peft model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from hf_bayes.posteriors.file_formats import ADAPTER_NAME, LORA_FACTORS, MODEL_PREFIX, SAVED_MODULES

_FACTOR = re.compile(rf"\.({'|'.join(LORA_FACTORS)})(?=\.|$)")
_COPY = re.compile(rf"\.(?:{SAVED_MODULES}|original_module)\.")


def adapter_key(name: str) -> str:
    """Return the key of a parameter in an adapter file: peft leaves out the adapter's name and its own wrappers.

    ``x.lora_A.default.weight -> x.lora_A.weight``;  ``x.modules_to_save.default.weight -> x.weight``.
    """
    name = re.sub(_FACTOR.pattern + r"\.[^.]+", r".\1", name)
    return re.sub(rf"\.{SAVED_MODULES}\.[^.]+\.", ".", name)


def adapter_keys(names: Iterable[str]) -> dict[str, str]:
    """Return {parameter name: ``adapter_key``}, in the order of the names."""
    return {name: adapter_key(name) for name in names}


def parameter_name(key: str, modules_to_save: Sequence[str]) -> str:
    """Return the parameter name of a key: the inverse of ``adapter_key`` for peft's adapter named "default"."""
    if ".lora_" in key:
        return _FACTOR.sub(rf".\1.{ADAPTER_NAME}", key)
    parts = key.removeprefix(MODEL_PREFIX).split(".")
    for length in range(1, len(parts)):
        module = ".".join(parts[:length])
        if module.endswith(tuple(modules_to_save)):  # as peft matches: "norm" also means input_layernorm
            rest = ".".join(parts[length:])
            return f"{key[: len(key) - len(rest) - 1]}.{SAVED_MODULES}.{ADAPTER_NAME}.{rest}"
    return key


def copied_key(key: str) -> str | None:
    """Return the key of the tensor that a further bias repeats, or None.

    With ``bias="all"`` peft also stores the biases of both copies in the wrapper of a saved module:
    ``x.modules_to_save.bias`` equals ``x.bias``, and ``x.original_module.bias`` is not used.
    """
    found = _COPY.sub(".", key, count=1)
    return None if found == key else found


def partner_key(key: str) -> str | None:
    """Return the key of the other factor of a LoRA product, or None for a tensor that is not a factor."""
    found = _FACTOR.search(key)
    if found is None or key.endswith(".bias"):
        return None
    swapped = found[1][:-1] + ("B" if found[1].endswith("A") else "A")
    return f"{key[: found.start()]}.{swapped}{key[found.end() :]}"
