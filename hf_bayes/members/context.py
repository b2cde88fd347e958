"""What stacked modules and trunk hooks share during one forward."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor


class Context:
    """The members now shown by a model, and how far the fold has gone in the current forward.

    Attributes:
        num_members: M.
        num_rows: B, rows of the batch before folding; folded tensors have M * B rows, row ``m * B + b`` of member m.
        num_positions: T, positions of a row.
        tensors: {parameter name: [M, *shape]}, views of theta.
        trunk: whether rows are alike over members until the first random layer, so that B rows suffice there.
        fanned_out: whether a random block has been reached in the current forward: rows differ from there on.
        num_forwards: forwards that have begun.
        used: names of the random parameters that have been read.
        cuts: id -> what a block of the trunk was given, and its first B rows, in the current forward.
    """

    def __init__(self) -> None:
        self.num_members = 1
        self.num_rows = 1
        self.num_positions = 1
        self.tensors: dict[str, Tensor] = {}
        self.trunk = False
        self.fanned_out = False
        self.num_forwards = 0
        self.used: set[str] = set()
        self.cuts: dict[int, tuple[Any, Any]] = {}
        self._copies: Tensor | None = None
        self._fresh = False

    def begin(self, num_rows: int, num_positions: int, *, trunk: bool) -> None:
        """Start a forward of ``num_rows`` rows a member."""
        self.num_rows, self.num_positions, self.trunk = num_rows, num_positions, trunk
        self.num_forwards += 1
        self.end()

    def mark_fanned_out(self, *, copies: bool) -> None:
        """The rows have just been repeated M times; ``copies``: they stay alike up to the first stacked module."""
        self._fresh = copies

    def end(self) -> None:
        """Forget what must not outlive a forward."""
        self._copies, self._fresh, self.fanned_out = None, False, False
        self.cuts = {}

    def replayed(self) -> tuple[AbstractContextManager, AbstractContextManager]:
        """What surrounds the first and the second run of a checkpointed block: torch's ``context_fn``."""
        state = {name: value for name, value in vars(self).items() if name != "used"}

        @contextmanager
        def again() -> Iterator[None]:
            before = dict(vars(self))
            vars(self).update(state)
            try:
                yield
            finally:
                vars(self).update(before)

        return nullcontext(), again()

    def single(self, x: Tensor) -> Tensor | None:
        """[B, ...] if the M * B rows of ``x`` are M copies of these (or ``x`` still has B rows), else None.

        Query, key and value projections read the same tensor object, which is how the second and third of them know.
        Where tokens have been flattened into rows (OPT's MLP), these are M copies of B * T.
        """
        if self.num_members == 1:
            return None
        if x.shape[0] == self.num_rows:
            return x
        if self._fresh:
            self._copies, self._fresh = x, False
        return x[: len(x) // self.num_members] if x is self._copies else None

    def members_of(self, name: str) -> Tensor:
        """[M, *shape]: the members' values of a random parameter."""
        tensor = self.tensors.get(name)
        if tensor is None:
            raise RuntimeError(f"{name} is random: call the BayesianModel that holds this model, or detach() it first")
        self.used.add(name)
        return tensor

    def fold(self, x: Tensor) -> Tensor:
        """[M * R, ..., k] -> [M, R * ..., k]; ``x`` itself where it has that shape."""
        if x.ndim == 3 and x.shape[0] == self.num_members:
            return x
        return x.reshape(self.num_members, -1, x.shape[-1])

    def repeat(self, x: Tensor) -> Tensor:
        """[B, ...] -> [M * B, ...], member-major."""
        return x.repeat(self.num_members, *[1] * (x.ndim - 1)) if self.num_members > 1 else x


def unfold(y: Tensor, like: Tensor, num_members: int) -> Tensor:
    """[M, R * ..., k] -> [M * R, ..., k], where ``like`` is [R, ..., *] or [M * R, ..., *]."""
    rows = y.shape[0] * y.shape[1] // math.prod(like.shape[1:-1])
    return y.reshape(rows, *like.shape[1:-1], y.shape[-1])


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` in ``dtype`` outside autocast, which casts by itself."""
    return x if x.dtype == dtype or torch.is_autocast_enabled(x.device.type) else x.to(dtype)
