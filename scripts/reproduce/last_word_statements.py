"""The statements of ``last_word``: sentences without their last word, and the same in other languages and orders."""

from __future__ import annotations

import codecs
import random
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Statement(NamedTuple):
    """A sentence without its last word, and the word."""

    prompt: str
    last: str


def statements(texts: Sequence[str], limit: int) -> list[Statement]:
    """Return sentences of 8 to 25 words whose last word has letters only, evenly spread over the texts."""
    found = []
    for sentence in re.split(r"(?<=[.!?])\s+", " ".join(texts)):
        words = sentence.rstrip(".").split()
        if sentence.endswith(".") and 8 <= len(words) <= 25 and words[-1].isalpha():
            found.append(Statement(" ".join(words[:-1]), words[-1]))
    return evenly(found, limit)


def code_lines(texts: Sequence[str], limit: int) -> list[Statement]:
    """Return lines of 8 to 25 words. The last word may be any token."""
    lines = [line.split() for text in texts for line in text.splitlines()]
    found = [Statement(" ".join(words[:-1]), words[-1]) for words in lines if 8 <= len(words) <= 25]
    return evenly(found, limit)


def shuffled(statement: Statement, seed: int) -> Statement:
    """Return the statements with the words before the last one in another order."""
    words = statement.prompt.split()
    random.Random(seed).shuffle(words)
    return Statement(" ".join(words), statement.last)


def rot13(statement: Statement) -> Statement:
    """Return the statements with every letter moved by 13."""
    return Statement(*(codecs.encode(part, "rot13") for part in statement))


def tasks(texts: Mapping[str, list[str]], limit: int) -> dict[str, list[Statement]]:
    """Return the statements in distribution, and three sets out of distribution."""
    inside = statements(texts["test"], limit)
    return {
        "test": inside,
        "rot13": [rot13(one) for one in inside],
        "shuffled": [shuffled(one, seed) for seed, one in enumerate(inside)],
        "code": code_lines(texts["code"], limit),
    }


def evenly(found: list[Statement], limit: int) -> list[Statement]:
    """Return at most ``limit`` of the items, evenly spread."""
    return [found[i * len(found) // limit] for i in range(limit)] if len(found) > limit else found
