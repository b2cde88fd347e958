"""The search for numbers that are not finite, and the error that names their step, chain and parameter."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_bayes.chains.objective import FailureWords, Objective
from hf_bayes.core.types import State


class NotFiniteError(FloatingPointError):
    """A number of a run that is not finite.

    Attributes:
        what: the name of the number, such as "energy".
        step: the update, counted from 1.
        place: ", " and the name of the parameter; "" where there is none.
    """

    def __init__(self, message: str, what: str, step: int, place: str) -> None:
        super().__init__(message)
        self.what, self.step, self.place = what, step, place

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (*self.args, self.what, self.step, self.place)  # for errors that cross processes


def not_finite(
    what: str, step: int, chains: Sequence[int], place: str, words: FailureWords, advice: str | None = None
) -> NotFiniteError:
    """Return the error about numbers of some chains.

    Args:
        advice: the end of the message, which says what to do; None takes the advice of ``words``.
    """
    named = f"chain {chains[0]}" if len(chains) == 1 else f"chains {', '.join(map(str, chains))}"
    advice = words.advice if advice is None else advice
    message = f"non-finite {what} at {words.step} {step} ({named}{place}): {advice}{words.cause}"
    return NotFiniteError(message, what, step, place)


def all_finite(values: Iterable[Tensor]) -> bool:
    """Return whether all numbers are finite, by one pass over memory; False may also be a sum that overflows."""
    return bool(torch.stack([value.sum().double() for value in values]).isfinite().all())


def rows_not_finite(value: Tensor) -> Tensor:
    """Return [M]: True for a chain that has a number in ``value`` [M, ...] that is not finite.

    Rows are summed first: a mask of all elements would take memory for every chain.
    """
    rows = value.reshape(len(value), -1)
    found = ~rows.sum(1, dtype=torch.float64).isfinite()
    for row in found.nonzero()[:, 0].tolist():
        found[row] = not bool(rows[row].isfinite().all())
    return found


def place_of(value: Tensor, row: int, objective: Objective) -> str:
    """Return the name of the first parameter of a chain that is not finite in ``value`` [M, ..., d], after ", "."""
    columns = (~value[row].isfinite()).reshape(-1, value.shape[-1]).any(0)
    return objective.place_of(int(columns.nonzero()[0, 0]))


def put_back(before: State, after: State, first: State, rows: Sequence[int]) -> State:
    """Return the state after an update with the values of ``first`` [m, ...] for the chains ``rows``.

    Args:
        before: the state before the update. Its tensors are not changed.
        after: the state that the update made. Its tensors are changed in place, except those of ``before``.
    """
    kept = {id(value) for value in before._asdict().values()}
    now = {name: value.clone() if id(value) in kept else value for name, value in after._asdict().items()}
    for name, value in first._asdict().items():
        now[name][rows] = value
    return type(after)(**now)
