"""The processes that save one directory together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Group(Protocol):
    """Processes that write one directory together, on a file system that they share."""

    @property
    def rank(self) -> int: ...

    @property
    def num_processes(self) -> int: ...

    def share(self, value: Any) -> list[Any]:
        """Return the values of all processes in the order of ranks. Every process must call this method."""
        ...


class Alone:
    """A group of one process."""

    rank = 0
    num_processes = 1

    def share(self, value: Any) -> list[Any]:
        return [value]


def together(group: Group, do: Callable[[], T]) -> list[T]:
    """Run one step on every process and return all results. A step that fails on one process fails on all."""
    result, error = None, None
    try:
        result = do()
    except BaseException as caught:
        error = caught
        if group.num_processes == 1:
            raise
    outcomes = group.share((result, None if error is None else f"{type(error).__name__}: {error}"))
    if error is not None:
        raise error
    for rank, (_, failure) in enumerate(outcomes):
        if failure is not None:
            raise OSError(f"process {rank} could not save: {failure}")
    return [value for value, _ in outcomes]
