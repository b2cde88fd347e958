"""Escaping for a model card: a value is shown as text and cannot add links, HTML, headings or table cells."""

from __future__ import annotations

import json
import re
import unicodedata
from functools import singledispatch
from typing import Any

_HOME = re.compile(r"(?:/home/|/Users/|/root/|[A-Za-z]:\\Users\\)[^\s`'\")|]*")
_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
# An underscore inside a word is plain text. At the edge of a word it would begin or end emphasis.
_ACTIVE = re.compile(r"[\\`*\[\]|~$]|(?<![^\W_])_|_(?![^\W_])|^[#+=-]")
_NUMBERED = re.compile(r"^(\d+)([.)])(?=\s|$)")
_MAX_LISTED = 8


class Verbatim(str):
    """Finished Markdown, which ``markdown`` leaves unchanged."""


def one_line(text: str) -> str:
    """Return ``text`` on one line, without control characters, invisible characters and paths of a home directory."""
    text = _HOME.sub("(local path)", text)
    kinds = ((character, unicodedata.category(character)) for character in text)
    shown = (" " if kind in ("Cc", "Zl", "Zp") else "" if kind[0] == "C" else character for character, kind in kinds)
    return " ".join("".join(shown).split())


@singledispatch
def markdown(value: Any) -> str:
    """Return Markdown that shows a value as text: no HTML, link, emphasis, heading or table cell can result."""
    line = _ACTIVE.sub(lambda match: f"\\{match[0]}", one_line(str(value)))
    line = _NUMBERED.sub(r"\1\\\2", line)
    return "".join(_ENTITIES.get(character, character) for character in line)


@markdown.register
def _verbatim(value: Verbatim) -> str:
    return value


@markdown.register
def _none(value: None) -> str:
    return "not defined"


@markdown.register
def _float(value: float) -> str:
    return f"{value:.4g}"


@markdown.register
def _integer(value: int) -> str:
    return str(value)


@markdown.register
def _boolean(value: bool) -> str:
    return "yes" if value else "no"


@markdown.register(list)
def _list(value: list[Any]) -> str:
    return f"{len(value)} values" if len(value) > _MAX_LISTED else ", ".join(map(markdown, value))


def literal(value: str) -> str:
    """Return a Python string literal for a code block. It holds no line break, so it cannot end the block."""
    return Verbatim(json.dumps(one_line(value), ensure_ascii=False))
