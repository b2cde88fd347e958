"""Questions about the type of a parsed JSON value; ``core.number_checks`` has those about numbers."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, TypeGuard


def is_texts(value: Any) -> TypeGuard[list[str]]:
    """Return whether a value is a list of texts."""
    return isinstance(value, list) and all(isinstance(entry, str) for entry in value)


def has_keys(value: Any, keys: Collection[str]) -> TypeGuard[dict[str, Any]]:
    """Return whether a value is an object with exactly these keys."""
    return isinstance(value, dict) and set(value) == set(keys)


def as_list(value: Any) -> list[Any]:
    """Return a list unchanged, and any other value as a list of one."""
    return value if isinstance(value, list) else [value]
