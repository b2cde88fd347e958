"""The record of a command: its arguments, its work and an example."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Command(NamedTuple):
    """A command of ``hf-bayes``.

    Attributes:
        run: the work, a function of one object of each dataclass of arguments.
        arguments: these dataclasses.
        example: the words after ``hf-bayes`` in an example, shown by ``--help``.
        first: the field that a first word without a flag is the value of.
        continuing: a function of the same objects as ``run`` that returns how to continue an interrupted run, in a
            sentence; None if there is nothing to continue.
        unused: the training arguments that the command refuses or does not use, which its help does not list.
    """

    run: Callable[..., Any]
    arguments: tuple[type[Any], ...]
    example: str
    first: str | None = None
    continuing: Callable[..., str] | None = None
    unused: frozenset[str] = frozenset()
