"""A lock for models that several threads use: a model can run only one set of members at a time."""

from __future__ import annotations

import threading
from typing import Any


class CopyableLock:
    """A reentrant lock. A copy of it is a new, independent lock."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[type[CopyableLock], tuple[Any, ...]]:
        return CopyableLock, ()
