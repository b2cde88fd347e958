"""Labelled text that every Debian machine has: what a package is, in one line, and the section that it was put into.

A row is (description, section), one for each source package, so that no two rows are of one piece of software. Of the
sixteen sections named after a subject every second one, in alphabetical order, is in distribution; the others are not.
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
"""Packages that are described in the words of another one."""

EMPTY = re.compile(r"\b(transitional|dummy|metapackage|meta-package)\b")


class Row(NamedTuple):
    """A description and its section."""

    text: str
    section: str


def index() -> str:
    """The index of all packages that this machine's package lists know.

    Raises:
        FileNotFoundError: where there is no apt.
    """
    if shutil.which("apt-cache") is None:
        raise FileNotFoundError("these texts are Debian's package index, and apt-cache, which has it, is not here")
    return subprocess.run(["apt-cache", "dumpavail"], check=True, capture_output=True, text=True).stdout


def stanzas(index: str) -> Iterator[dict[str, str]]:
    """The fields of each package."""
    for stanza in index.split("\n\n"):
        yield dict(re.findall(r"^([A-Za-z0-9-]+): (.*)$", stanza, re.MULTILINE))


def rows_of(index: str) -> list[Row]:
    """One row of each source package, in the order of the sources' names; no text comes twice."""
    sources: dict[str, Row] = {}
    for fields in stanzas(index):
        row = Row(fields.get("Description", ""), fields.get("Section", "").rpartition("/")[2])
        if row.section in SECTIONS and not COMPANIONS.search(fields["Package"]) and not EMPTY.search(row.text):
            sources.setdefault(fields.get("Source", fields["Package"]).split(" ")[0], row)
    texts = {row.text: row for _, row in sorted(sources.items(), reverse=True) if row.text}
    return list(reversed(texts.values()))


def splits(rows: Sequence[Row], sizes: Mapping[str, int]) -> dict[str, list[Row]]:
    """Rows drawn at random, always the same, for each name in ``sizes``: "ood" of the unknown sections, others of the
    known ones.

    Raises:
        ValueError: if there are not as many.
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
    """sha256 of all rows of all parts, in their order."""
    lines = (f"{name}\t{row.section}\t{row.text}\n" for name, rows in parts.items() for row in rows)
    return hashlib.sha256("".join(lines).encode()).hexdigest()
