"""Bytes <-> tensors and JSON values, strictly: what is ambiguous, not finite or not plain data is never guessed.

Only safetensors and JSON exist here; neither can run code.
"""

from __future__ import annotations

import enum
import json
import math
import os
import struct
from collections.abc import Mapping
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors import torch as safetensors
from torch import Tensor

_DTYPES = frozenset({"F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL"})
_MAX_HEADER = 100_000_000  # the limit of the safetensors format itself


def encode_tensors(tensors: Mapping[str, Tensor], *, where: str) -> bytes:
    """A safetensors file. Deterministic: equal tensors give equal bytes.

    Raises:
        ValueError: naming the tensor that is not finite.
    """
    # safetensors refuses views that overlap; a tensor of its own per name costs one file's worth of memory.
    own = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    _refuse_non_finite(own, where)
    # transformers refuses a file whose header lacks this entry.
    return safetensors.save(own, metadata={"format": "pt"})


def decode_tensors(data: bytes, *, where: str) -> dict[str, Tensor]:
    """The tensors of a safetensors file.

    Raises:
        ValueError: for a malformed header, a key given twice, an unknown dtype or a value that is not finite.
    """
    _check_header(data, where)
    try:
        tensors = safetensors.load(data)
    except (SafetensorError, RuntimeError, KeyError, AssertionError) as error:
        raise ValueError(f"{where} is not a valid safetensors file: {error}") from error
    _refuse_non_finite(tensors, where)
    return tensors


def encode_json(value: Mapping[str, Any], *, where: str) -> bytes:
    """UTF-8 JSON with a final newline.

    Raises:
        ValueError: for NaN, infinities and values that are not JSON.
    """
    try:
        return (json.dumps(value, indent=2, allow_nan=False, ensure_ascii=False) + "\n").encode()
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where} cannot be written as JSON: {error}") from error


def decode_json(data: bytes, *, where: str) -> dict[str, Any]:
    """The one object of a JSON file.

    Raises:
        ValueError: for malformed text, a key given twice, NaN, infinities, or anything but an object.
    """
    try:
        value = json.loads(
            data.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_refuse_constant, parse_float=_finite_float
        )
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{where} must hold a JSON object, got {type(value).__name__}")
    return value


def plain(value: Any, where: str, *, undefined_is_null: bool = False) -> Any:
    """JSON values of what Python code holds: sets sorted, enums by value, tensors and numpy scalars as numbers.

    Args:
        value: anything.
        where: what it is called in an error.
        undefined_is_null: NaN and infinities become None instead of an error.
    Raises:
        ValueError: naming the entry that is not plain data.
    """
    if isinstance(value, enum.Enum):
        return plain(value.value, where)
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        if undefined_is_null:
            return None
        raise ValueError(f"{where} must be finite, got {value}")
    if isinstance(value, Mapping):
        return {str(key): plain(v, f"{where}.{key}", undefined_is_null=undefined_is_null) for key, v in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(plain(v, where) for v in value)
    if isinstance(value, (list, tuple)):
        return [plain(v, f"{where}[{i}]", undefined_is_null=undefined_is_null) for i, v in enumerate(value)]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "tolist"):
        return plain(value.tolist(), where, undefined_is_null=undefined_is_null)
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    raise ValueError(f"{where} holds a {type(value).__name__}, expected numbers, texts, lists or mappings")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"key given twice: {next(key for key in keys if keys.count(key) > 1)!r}")
    return values


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is not a number of JSON")


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} does not fit a float")
    return value


def _check_header(data: bytes, where: str) -> None:
    """What the safetensors library lets pass: keys given twice, unknown fields, dtypes that nothing here writes."""
    if len(data) < 8:
        raise ValueError(f"{where} is not a valid safetensors file: {len(data)} bytes, expected at least 8")
    (length,) = struct.unpack("<Q", data[:8])
    if length > min(_MAX_HEADER, len(data) - 8):
        raise ValueError(f"{where} is not a valid safetensors file: header of {length} bytes in {len(data)}")
    header = decode_json(data[8 : 8 + length], where=f"the header of {where}")
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            raise ValueError(
                f"{where}: the entry of {name!r} must have dtype, shape and data_offsets, got {entry!r:.200}"
            )
        if entry["dtype"] not in _DTYPES:
            raise ValueError(
                f"{where}: {name} has dtype {entry['dtype']!r}, expected one of {', '.join(sorted(_DTYPES))}"
            )


def _refuse_non_finite(tensors: Mapping[str, Tensor], where: str) -> None:
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            bad = int((~torch.isfinite(tensor)).sum())
            raise ValueError(f"{where}: {name} holds {bad} values that are NaN or infinite (of {tensor.numel()})")
