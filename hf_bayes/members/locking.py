"""Threads that ask one model take turns: its modules lend their forwards to one set of members at a time."""

from __future__ import annotations

import threading
from typing import Any


class Turns:
    """A lock that the thread which holds it may take again, and of which every copy is a lock of its own."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[type[Turns], tuple[Any, ...]]:
        return Turns, ()
