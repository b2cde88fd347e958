"""Checks of numbers that a user gives. In Python True is an integer, and it is refused here."""

from __future__ import annotations

import math
from typing import Any


def is_count(value: Any, *, minimum: int = 1) -> bool:
    """Return whether ``value`` is an integer of at least ``minimum``."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= minimum


def is_finite_number(value: Any) -> bool:
    """Return whether ``value`` is a finite integer or float."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
