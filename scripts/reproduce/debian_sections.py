"""Labelled text from every Debian machine: the one-line description of a package, and its section in the archive.

A row is (description, section). There is one row for each source package, so no two rows describe the same software.
Of the sixteen sections named after a subject, every second one in alphabetical order is in distribution.

This module is not a command: ``encoder_table`` imports it.
"""

from __future__ import annotations

import hashlib
import random
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

SECTIONS = (
    *("admin", "database", "editors", "electronics", "fonts", "games", "graphics", "hamradio"),
    *("mail", "math", "net", "science", "sound", "text", "video", "web"),
)
KNOWN, UNKNOWN = SECTIONS[::2], SECTIONS[1::2]

COMPANIONS = re.compile(r"-(data|common|dbg|dbgsym|dev|doc|docs)$")
"""The packages that repeat the description of another package."""

EMPTY = re.compile(r"\b(transitional|dummy|metapackage|meta-package)\b")


class Row(NamedTuple):
    """A description and its section."""

    text: str
    section: str


def index() -> str:
    """Return the index of all packages in this machine's package lists.

    Raises:
        FileNotFoundError: if there is no apt.
    """
    if shutil.which("apt-cache") is None:
        raise FileNotFoundError("these texts come from Debian's package index, but apt-cache is not installed")
    return subprocess.run(["apt-cache", "dumpavail"], check=True, capture_output=True, text=True).stdout


def stanzas(index: str) -> Iterator[dict[str, str]]:
    """Yield the fields of each package."""
    for stanza in index.split("\n\n"):
        yield dict(re.findall(r"^([A-Za-z0-9-]+): (.*)$", stanza, re.MULTILINE))


def rows_of(index: str) -> list[Row]:
    """Return one row for each source package, in the order of their names. No text occurs twice."""
    sources: dict[str, Row] = {}
    for fields in stanzas(index):
        row = Row(fields.get("Description", ""), fields.get("Section", "").rpartition("/")[2])
        if row.section in SECTIONS and not COMPANIONS.search(fields["Package"]) and not EMPTY.search(row.text):
            sources.setdefault(fields.get("Source", fields["Package"]).split(" ")[0], row)
    texts = {row.text: row for _, row in sorted(sources.items(), reverse=True) if row.text}
    return list(reversed(texts.values()))


def splits(rows: Sequence[Row], sizes: Mapping[str, int]) -> dict[str, list[Row]]:
    """Return rows for each name in ``sizes``, drawn with a fixed seed: "ood" from the unknown sections,
    every other name from the known sections.

    Raises:
        ValueError: if there are too few rows.
    """
    shuffled = random.Random(0).sample(list(rows), len(rows))
    pools = {known: [row for row in shuffled if (row.section in KNOWN) is known] for known in (True, False)}
    parts = {}
    for name, size in sizes.items():
        pool = pools[name != "ood"]
        if len(pool) < size:
            raise ValueError(f"the package lists have {len(pool)} rows left for {name!r}, {size} are wanted")
        parts[name], pool[:size] = pool[:size], []
    return parts


def fingerprint(parts: Mapping[str, Sequence[Row]]) -> str:
    """Return the sha256 of all rows of all parts, in their order."""
    lines = (f"{name}\t{row.section}\t{row.text}\n" for name, rows in parts.items() for row in rows)
    return hashlib.sha256("".join(lines).encode()).hexdigest()
