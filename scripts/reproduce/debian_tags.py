"""Text with several labels from every Debian machine: the one-line description of a package, and its tags.

Debian's tags (debtags) say what a package is, what it is for and how it is used. A row is (description, a label for
each tag of ``TAGS``). There is one row for each source package. Sections of the archive that ``debian_sections`` calls
unknown are out of distribution.

This module is not a command: ``recommend`` imports it.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable
from typing import NamedTuple

from scripts.reproduce.debian_sections import COMPANIONS, EMPTY, UNKNOWN, stanzas

TAGS = (
    *("devel::library", "implemented-in::c", "implemented-in::perl", "implemented-in::python"),
    *("interface::commandline", "interface::daemon", "interface::x11", "role::program"),
    *("scope::utility", "use::gameplaying", "works-with::audio", "works-with::text"),
)


class Tagged(NamedTuple):
    """A description and its labels, 1.0 for each of ``TAGS`` that the package has."""

    text: str
    labels: tuple[float, ...]


def tagged_rows(index: str) -> tuple[list[Tagged], list[Tagged]]:
    """Return the rows of known sections and of unknown ones, each in a fixed random order. Each has at least one tag.

    Args:
        index: the package index, see ``debian_sections.index``.
    """
    found: dict[bool, dict[str, Tagged]] = {True: {}, False: {}}
    for stanza, fields in zip(index.split("\n\n"), stanzas(index), strict=True):
        tags = re.search(r"^Tag:((?:.*)(?:\n .*)*)", stanza, re.MULTILINE)
        text = fields.get("Description", "")
        if not tags or not text or COMPANIONS.search(fields["Package"]) or EMPTY.search(text):
            continue
        names = set(re.findall(r"[\w-]+::[\w:-]+", tags.group(1)))
        row = Tagged(text, tuple(float(tag in names) for tag in TAGS))
        if not any(row.labels):
            continue
        known = fields.get("Section", "").rpartition("/")[2] not in UNKNOWN
        found[known].setdefault(fields.get("Source", fields["Package"]).split(" ")[0], row)
    inside, outside = ({row.text: row for row in found[known].values()} for known in (True, False))
    return _shuffled(inside.values()), _shuffled(row for text, row in outside.items() if text not in inside)


def _shuffled(rows: Iterable[Tagged]) -> list[Tagged]:
    ordered = sorted(rows)
    return random.Random(0).sample(ordered, len(ordered))
