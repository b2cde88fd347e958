"""Labelled text from a Debian machine: one-line descriptions of packages, labelled by the section of the archive.

Maintainers choose sections by judgement. No model can predict all of them, so the likelihood has real noise.

This module is not a command: ``temperature_sweep`` imports it.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from scripts.reproduce.debian_sections import index, stanzas

SECTIONS = ("admin", "net", "text", "utils")


def described() -> dict[str, str]:
    """Return {description: section} of the packages in ``SECTIONS``. Of equal descriptions the first one counts."""
    found: dict[str, str] = {}
    for fields in stanzas(index()):
        text = " ".join(fields.get("Description", "").split())
        section = fields.get("Section", "").split("/")[-1]
        if section in SECTIONS and len(text.split()) >= 3:
            found.setdefault(text, section)
    return found


def write(directory: Path, *, seed: int = 0) -> tuple[Path, Path]:
    """Write ``train.jsonl`` and ``test.jsonl`` (a third of the rows), in random order."""
    rows = [{"text": text, "label": section} for text, section in sorted(described().items())]
    random.Random(seed).shuffle(rows)
    directory.mkdir(parents=True, exist_ok=True)
    cut = len(rows) // 3
    files = {"test": rows[:cut], "train": rows[cut:]}
    for name, part in files.items():
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    return directory / "train.jsonl", directory / "test.jsonl"
