"""Questions about the type of a parsed JSON value. True and false are not integers here."""

from __future__ import annotations

import math
from typing import Any, TypeGuard


def is_integer(value: Any, low: float = -math.inf, high: float = math.inf) -> TypeGuard[int]:
    """Return whether a value is an integer with ``low <= value < high``."""
    return isinstance(value, int) and not isinstance(value, bool) and low <= value < high


def is_number(value: Any) -> TypeGuard[int | float]:
    """Return whether a value is an integer or a float."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_texts(value: Any) -> TypeGuard[list[str]]:
    """Return whether a value is a list of texts."""
    return isinstance(value, list) and all(isinstance(entry, str) for entry in value)
