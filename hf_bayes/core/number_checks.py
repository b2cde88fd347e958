"""Checks of numbers that a user or a file gives. In Python True is an integer, and it is refused here."""

from __future__ import annotations

import math
from numbers import Integral
from typing import Any, TypeGuard


def is_integral(value: Any) -> TypeGuard[int]:
    """Return whether ``value`` is an integer of Python or numpy."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_integer(value: Any, low: float = -math.inf, high: float = math.inf) -> TypeGuard[int]:
    """Return whether ``value`` is an integer of Python with ``low <= value < high``."""
    return isinstance(value, int) and type(value) is not bool and low <= value < high


def is_count(value: Any, *, minimum: int = 1) -> TypeGuard[int]:
    """Return whether ``value`` is an integer of at least ``minimum``."""
    return is_integer(value, minimum)


def is_number(value: Any) -> TypeGuard[int | float]:
    """Return whether ``value`` is an integer or a float."""
    return isinstance(value, (int, float)) and type(value) is not bool


def is_finite_number(value: Any) -> TypeGuard[int | float]:
    """Return whether ``value`` is a finite integer or float."""
    return is_number(value) and math.isfinite(value)
