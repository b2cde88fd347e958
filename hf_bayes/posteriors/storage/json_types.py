"""Questions about the type of a parsed JSON value. True and false are not integers here."""

from __future__ import annotations

import math
from typing import Any, TypeGuard


def is_object(value: Any) -> TypeGuard[dict[str, Any]]:
    """Return whether a value is a JSON object."""
    return isinstance(value, dict)


def is_list(value: Any) -> TypeGuard[list[Any]]:
    """Return whether a value is a JSON list."""
    return isinstance(value, list)


def is_text(value: Any) -> TypeGuard[str]:
    """Return whether a value is a text."""
    return isinstance(value, str)


def is_boolean(value: Any) -> TypeGuard[bool]:
    """Return whether a value is true or false."""
    return isinstance(value, bool)


def is_integer(value: Any, low: float = -math.inf, high: float = math.inf) -> TypeGuard[int]:
    """Return whether a value is an integer with ``low <= value < high``."""
    return isinstance(value, int) and not isinstance(value, bool) and low <= value < high


def is_number(value: Any) -> TypeGuard[int | float]:
    """Return whether a value is an integer or a float."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_texts(value: Any) -> TypeGuard[list[str]]:
    """Return whether a value is a list of texts."""
    return is_list(value) and all(map(is_text, value))
