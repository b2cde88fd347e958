"""The content of a file and its bytes. The suffix of the file's name decides the format.

Data are safetensors or JSON, and neither can run code. Ambiguous or non-finite data are refused, never guessed.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors import torch as safetensors
from torch import Tensor

from hf_bayes.core.tensors import tensors_in
from hf_bayes.posteriors.file_formats import SAFETENSORS_METADATA
from hf_bayes.posteriors.storage.json_types import has_keys, require_object
from hf_bayes.posteriors.storage.listing import shown

Content = Mapping[str, Tensor] | Mapping[str, Any] | str | bytes
"""The content of a file, by its suffix: ``.safetensors`` named tensors, ``.json`` one object, ``.md`` a text.

Bytes are written unchanged, under any suffix. A file with another suffix can only be bytes.
"""

_DTYPES = frozenset({"F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL"})
# Limits on the memory and time that a file may take before its content is checked. Real posteriors stay far below: a
# posterior over all tensors of an 8B model has about 300 names, one over LoRA on all linear layers of 100 blocks 1,400.
MAX_DEPTH = 64
MAX_TEXT = 16 * 2**20
MAX_VALUES = 2_000_000
MAX_CONTAINERS = 100_000
MAX_TENSORS = 20_000
MAX_NAME = 1_000


def texts_in(files: Mapping[str, Content]) -> dict[str, str]:
    """Return the files that are texts."""
    return {name: content for name, content in files.items() if isinstance(content, str)}


def bytes_in(files: Mapping[str, Content]) -> dict[str, bytes]:
    """Return the files that are written unchanged."""
    return {name: content for name, content in files.items() if isinstance(content, bytes)}


def encode(name: str, content: Content) -> bytes:
    """Return the bytes of a file.

    Raises:
        ValueError: if a tensor is not finite, or a value is not JSON.
    """
    if isinstance(content, bytes):
        return content
    if isinstance(content, str):
        return content.encode()
    return (encode_tensors if name.endswith(".safetensors") else encode_json)(content, where=name)


def decode(name: str, data: bytes, *, where: str, shapes: Mapping[str, tuple[int, ...]] | None = None) -> Any:
    """Return named tensors (``.safetensors``), an object (``.json``) or the bytes themselves.

    Raises:
        ValueError: if the bytes do not fit the suffix or the ``shapes``. ``where`` names the file in the message.
    """
    if name.endswith(".md"):
        raise ValueError(f"{where}: a text is not read as data")
    if name.endswith(".safetensors"):
        return decode_tensors(data, where=where, shapes=shapes)
    return decode_json(data, where=where) if name.endswith(".json") else data


def size_in_bytes(content: Content) -> int:
    """Return about how many bytes the content takes on disk. The few bytes of a JSON object count as 0."""
    if isinstance(content, (str, bytes)):
        return len(content)
    return sum(tensor.nbytes for tensor in tensors_in(content).values())


def encode_tensors(tensors: Mapping[str, Tensor], *, where: str) -> bytes:
    """Return the bytes of a safetensors file. Equal tensors give equal bytes.

    Raises:
        ValueError: naming the tensor that is not finite.
    """
    if len(tensors) > MAX_TENSORS:
        raise ValueError(f"{where} would hold {len(tensors):,} tensors, expected at most {MAX_TENSORS:,}")
    # safetensors refuses views that overlap. A copy of each tensor costs as much memory as the file.
    own = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    _refuse_non_finite(own, where)
    return safetensors.save(own, metadata=SAFETENSORS_METADATA)


def decode_tensors(
    data: bytes, *, where: str, shapes: Mapping[str, tuple[int, ...]] | None = None
) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file.

    Args:
        data: the bytes of the file.
        where: the name of the file in an error.
        shapes: the name and shape of each expected tensor. They are compared with the header before any tensor is
            made. None accepts all tensors.
    Raises:
        ValueError: for a malformed header, a key given twice, an unknown dtype, other tensors than expected, or a value
            that is not finite.
    """
    header = read_header(data, where)
    if shapes is not None:
        _check_shapes(header, shapes, where)
    try:
        tensors = safetensors.load(data)
    except (SafetensorError, RuntimeError, KeyError, AssertionError) as error:
        raise ValueError(f"{where} is not a valid safetensors file: {error}") from error
    _refuse_non_finite(tensors, where)
    return tensors


def encode_json(value: Mapping[str, Any], *, where: str) -> bytes:
    """Return UTF-8 JSON with a final newline.

    Raises:
        ValueError: for NaN, infinities and values that are not JSON.
    """
    try:
        data = (json.dumps(value, indent=2, allow_nan=False, ensure_ascii=False) + "\n").encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{where} cannot be written as JSON: {error}") from error
    _check_extent(data, where)
    return data


def decode_json(data: bytes, *, where: str) -> dict[str, Any]:
    """Return the one object of a JSON file.

    Raises:
        ValueError: for malformed text, a key given twice, NaN, infinities, any value but an object, or an object that
            is too large or nested too deep.
    """
    _check_extent(data, where)
    try:
        value = json.loads(
            data.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_refuse_constant, parse_float=_finite_float
        )
    except RecursionError:
        raise ValueError(too_deep(where)) from None
    except ValueError as error:
        raise ValueError(f"{where} is not valid JSON: {error}") from error
    found = require_object(value, where)
    _check_depth(found, where)
    return found


def _check_extent(data: bytes, where: str) -> None:
    """Bound the memory of parsing: a list or an object of 2 bytes becomes a Python object of 64 to 232 bytes."""
    if len(data) > MAX_TEXT:
        raise ValueError(f"{where} is a JSON of {len(data):,} bytes, expected at most {MAX_TEXT:,}: refused")
    for what, count, limit in (
        ("lists and objects", data.count(b"[") + data.count(b"{"), MAX_CONTAINERS),
        ("values", data.count(b","), MAX_VALUES),
    ):
        if count > limit:
            raise ValueError(f"{where} is a JSON of {count:,} {what}, expected at most {limit:,}: refused")


def _check_depth(value: Any, where: str) -> None:
    """Refuse deep nesting, without recursion."""
    level = [value]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for container in level:
            values = container.values() if isinstance(container, dict) else container
            below += [value for value in values if type(value) in (dict, list)]
        if not below:
            return
        level = below
    raise ValueError(too_deep(where))


def too_deep(where: str) -> str:
    """Return the error message about a value that is nested too deep."""
    return (
        f"{where} nests lists and objects more than {MAX_DEPTH} deep: refused. Nothing that hf_bayes writes is so deep"
    )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"key given twice: {twice!r:.200}")
    return values


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is not a number of JSON")


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} does not fit a float")
    return value


def read_header(data: bytes, where: str) -> dict[str, Any]:
    """Return the entries of a safetensors header, given the beginning of its file.

    Raises:
        ValueError: for a malformed header. Some faults are refused that the safetensors library accepts: a key given
            twice, an unknown field, a dtype that hf_bayes never writes, or more than ``MAX_TENSORS`` tensors.
    """
    if len(data) < 8:
        raise ValueError(f"{where} is not a valid safetensors file: {len(data)} bytes, expected at least 8")
    (length,) = struct.unpack("<Q", data[:8])
    if length > min(MAX_TEXT, len(data) - 8):
        raise ValueError(f"{where} is not a valid safetensors file: header of {length} bytes in {len(data)}")
    header = decode_json(data[8 : 8 + length], where=f"the header of {where}")
    header.pop("__metadata__", None)
    if len(header) > MAX_TENSORS:
        raise ValueError(f"{where} holds {len(header):,} tensors, expected at most {MAX_TENSORS:,}: refused")
    for name, entry in header.items():
        if len(name) > MAX_NAME:
            raise ValueError(f"{where}: a tensor's name has {len(name):,} characters, expected at most {MAX_NAME:,}")
        if not has_keys(entry, ("dtype", "shape", "data_offsets")):
            raise ValueError(
                f"{where}: the entry of {name!r} must have dtype, shape and data_offsets, got {entry!r:.200}"
            )
        if entry["dtype"] not in list(_DTYPES):  # a list also compares what has no hash
            raise ValueError(
                f"{where}: {name} has dtype {entry['dtype']!r}, expected one of {', '.join(sorted(_DTYPES))}"
            )
    return header


def _check_shapes(header: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], where: str) -> None:
    missing, extra = sorted(set(shapes) - set(header)), sorted(set(header) - set(shapes))
    if missing or extra:
        raise ValueError(f"{where}: missing tensors {shown(missing)}, unknown tensors {shown(extra)}")
    for name, shape in shapes.items():
        if header[name]["shape"] != list(shape):
            raise ValueError(f"{where}: {name}: expected shape {list(shape)}, got {header[name]['shape']!r:.200}")


def _refuse_non_finite(tensors: Mapping[str, Tensor], where: str) -> None:
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            bad = int((~torch.isfinite(tensor)).sum())
            raise ValueError(f"{where}: {name} holds {bad} values that are NaN or infinite (of {tensor.numel()})")
