"""Questions about the type of a parsed JSON value; ``core.number_checks`` has those about numbers."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, TypeGuard

from hf_bayes.core.text_safety import is_plain_line


def is_texts(value: Any) -> TypeGuard[list[str]]:
    """Return whether a value is a list of texts."""
    return isinstance(value, list) and all(isinstance(entry, str) for entry in value)


def is_line(value: Any) -> TypeGuard[str]:
    """Return whether a value is one line of text without characters that act on terminals."""
    return isinstance(value, str) and is_plain_line(value)


def has_keys(value: Any, keys: Collection[str]) -> TypeGuard[dict[str, Any]]:
    """Return whether a value is an object with exactly these keys."""
    return isinstance(value, dict) and set(value) == set(keys)


def require_object(value: Any, where: str) -> dict[str, Any]:
    """Return an object unchanged.

    Raises:
        ValueError: for any other value; ``where`` names its file.
    """
    if not isinstance(value, dict):
        raise ValueError(f"{where} must hold a JSON object, got {type(value).__name__}")
    return value


def as_list(value: Any) -> list[Any]:
    """Return a list unchanged, and any other value as a list of one."""
    return value if isinstance(value, list) else [value]
