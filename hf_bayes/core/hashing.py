"""What tells one base model, or tokenizer, from another: hashes that a posterior carries."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

MAX_ELEMENTS = 1 << 20
"""Elements hashed of each tensor: all of it up to here, beyond it as many spread evenly (an 8B model takes seconds)."""


def fingerprint_tensors(named: Iterable[tuple[str, Tensor]]) -> str:
    """sha256 over names, shapes, dtypes and values, whatever the order they come in."""
    digest = hashlib.sha256()
    for name, tensor in sorted(_plain(named), key=lambda item: item[0]):
        digest.update(f"{name} {list(tensor.shape)} {tensor.dtype}\n".encode())
        flat = tensor.detach().reshape(-1)
        stride = -(-flat.numel() // MAX_ELEMENTS) or 1
        digest.update(flat[::stride].contiguous().cpu().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _plain(named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Quantised tensors that are several in one (torchao's) as those."""
    for name, tensor in named:
        if hasattr(tensor, "__tensor_flatten__"):
            inner, _ = tensor.__tensor_flatten__()
            yield from _plain((f"{name}.{part}", getattr(tensor, part)) for part in inner)
        else:
            yield name, tensor


def fingerprint_json(value: Any) -> str:
    """sha256 of the canonical JSON form."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()
