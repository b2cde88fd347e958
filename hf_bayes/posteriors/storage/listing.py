"""Short lists of names for error messages."""

from __future__ import annotations

from collections.abc import Iterable

_NUM_SHOWN = 5
_MAX_SHOWN_NAME = 1_000


def some(names: list[str]) -> str:
    """Return the first few of many names, separated by commas."""
    return ", ".join(names[:_NUM_SHOWN]) + _more(names)


def shown(names: Iterable[str]) -> str:
    """Return the first few of many names as Python prints a list. A very long name is cut."""
    names = list(names)
    return repr([name[:_MAX_SHOWN_NAME] for name in names[:_NUM_SHOWN]]) + _more(names)


def _more(names: list[str]) -> str:
    return f" and {len(names) - _NUM_SHOWN:,} more" if len(names) > _NUM_SHOWN else ""
