"""Edits of the files of a posterior on disk."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save

Fault = Callable[[Path, random.Random], None]


def tensor_files(directory: Path) -> list[Path]:
    return sorted(directory.rglob("*.safetensors"))


def listed(directory: Path) -> list[Path]:
    return [directory / name for name in json.loads((directory / "manifest.json").read_text())["files"]]


def sign(directory: Path) -> None:
    """Give the manifest the sizes and hashes of the present files, so that only their meaning is wrong."""
    path = directory / "manifest.json"
    manifest = json.loads(path.read_text())
    for name, entry in manifest["files"].items():
        if (directory / name).is_file():
            data = (directory / name).read_bytes()
            entry.update(size=len(data), sha256=hashlib.sha256(data).hexdigest())
    path.write_text(json.dumps(manifest))


def flip(path: Path, rng: random.Random, first: int, last: int) -> None:
    data = bytearray(path.read_bytes())
    data[rng.randrange(first, last)] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def header_end(path: Path) -> int:
    return 8 + struct.unpack("<Q", path.read_bytes()[:8])[0]


def edit_json(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def edit_tensors(path: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(path)
    change(tensors)
    path.write_bytes(save({name: tensor.contiguous() for name, tensor in tensors.items()}, metadata={"format": "pt"}))


def edit_header(path: Path, change: Callable[[str], str]) -> None:
    data, end = path.read_bytes(), header_end(path)
    header = change(data[8:end].decode()).encode()
    header += b" " * (-len(header) % 8)
    path.write_bytes(struct.pack("<Q", len(header)) + header + data[end:])


def edit_text(directory: Path, name: str, old: str, new: str) -> None:
    text = (directory / name).read_text()
    assert old in text
    (directory / name).write_text(text.replace(old, new, 1))


def copy_member_over_another(directory: Path, rng: random.Random) -> None:
    one, other = rng.sample(sorted(directory.glob("members/*/*.safetensors")), 2)
    shutil.copy(one, other)
