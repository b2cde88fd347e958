"""Hashes by which a posterior recognises its base model and tokenizer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

MAX_ELEMENTS = 1 << 20
"""The largest number of elements that are hashed of one tensor.

Of a larger tensor this many elements, evenly spaced, are hashed. A model of 8 billion weights takes seconds.
"""


def fingerprint_tensors(named: Iterable[tuple[str, Tensor]]) -> str:
    """Return the sha256 of names, shapes, dtypes and values. It does not depend on the order of the tensors."""
    digest = hashlib.sha256()
    for name, tensor in sorted(_parts(named), key=lambda item: item[0]):
        digest.update(f"{name} {list(tensor.shape)} {tensor.dtype}\n".encode())
        flat = tensor.detach().reshape(-1)
        stride = -(-flat.numel() // MAX_ELEMENTS) or 1
        # a copy, since ``contiguous()`` keeps the stride of a single element in a column, which has no view as bytes
        values = flat[::stride].clone(memory_format=torch.contiguous_format).cpu()
        digest.update(values.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _parts(named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the named tensors. A tensor that torchao has quantised is replaced by its parts."""
    for name, tensor in named:
        if hasattr(tensor, "__tensor_flatten__"):
            inner, _ = tensor.__tensor_flatten__()
            yield from _parts((f"{name}.{part}", getattr(tensor, part)) for part in inner)
        else:
            yield name, tensor


def fingerprint_json(value: Any) -> str:
    """Return the sha256 of the canonical JSON form."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()
