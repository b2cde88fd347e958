"""The content of one file in memory, and its bytes: the suffix of the file's name decides the format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from hf_bayes.core.tensors import tensors_in
from hf_bayes.posteriors.storage.formats import decode_json, decode_tensors, encode_json, encode_tensors

Content = Mapping[str, Tensor] | Mapping[str, Any] | str | bytes
"""The content of a file, by its suffix: ``.safetensors`` named tensors, ``.json`` one object, ``.md`` a text.

Bytes are written unchanged, under any suffix. A file with another suffix can only be bytes.
"""


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
