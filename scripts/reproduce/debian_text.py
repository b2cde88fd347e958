"""Labelled text that a Debian machine carries: what section of the archive does a one-line description belong to?

Maintainers choose sections by judgement, so that no model can know all of them: a real likelihood with noise.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from scripts.reproduce.debian_sections import index, stanzas

SECTIONS = ("admin", "net", "text", "utils")


def described() -> dict[str, str]:
    """{description: section} of the packages in ``SECTIONS``; of equal descriptions, the first."""
    found: dict[str, str] = {}
    for fields in stanzas(index()):
        text = " ".join(fields.get("Description", "").split())
        section = fields.get("Section", "").split("/")[-1]
        if section in SECTIONS and len(text.split()) >= 3:
            found.setdefault(text, section)
    return found


def write(directory: Path, *, seed: int = 0) -> tuple[Path, Path]:
    """``train.jsonl`` and ``test.jsonl``, a third of the rows, in random order."""
    rows = [{"text": text, "label": section} for text, section in sorted(described().items())]
    random.Random(seed).shuffle(rows)
    directory.mkdir(parents=True, exist_ok=True)
    cut = len(rows) // 3
    files = {"test": rows[:cut], "train": rows[cut:]}
    for name, part in files.items():
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    return directory / "train.jsonl", directory / "test.jsonl"
