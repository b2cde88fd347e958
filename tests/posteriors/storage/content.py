"""Two contents of one directory, and what a directory holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hf_bayes.posteriors.storage import read_directory

FORMAT = "test.checkpoint"

OLD = {"a.safetensors": {"w": torch.zeros(3)}, "members/m0/b.json": {"x": 1}, "members/m1/b.json": {"x": 1}}

NEW = {"a.safetensors": {"w": torch.ones(5)}, "members/m0/b.json": {"x": 2}, "c.json": {}, "README.md": "# new\n"}


def content(directory: Path) -> dict[str, Any]:
    return comparable(read_directory(directory, format=FORMAT))


def comparable(files: dict[str, Any]) -> dict[str, Any]:
    return {
        name: {key: value.tolist() if isinstance(value, torch.Tensor) else value for key, value in file.items()}
        for name, file in files.items()
        if not name.endswith(".md")
    }


def names(directory: Path) -> set[str]:
    return {path.relative_to(directory).as_posix() for path in directory.rglob("*")}
