"""Questions about the type of a parsed JSON value; ``core.number_checks`` has those about numbers."""

from __future__ import annotations

from typing import Any, TypeGuard


def is_texts(value: Any) -> TypeGuard[list[str]]:
    """Return whether a value is a list of texts."""
    return isinstance(value, list) and all(isinstance(entry, str) for entry in value)
