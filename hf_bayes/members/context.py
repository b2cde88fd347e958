"""The state that stacked modules and trunk hooks share during one forward pass."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor


class Context:
    """The members that are bound to a model, and the state of folding in the current forward pass.

    Attributes:
        num_members: M.
        num_rows: B, the rows of the batch before folding. Folded tensors have M * B rows; row ``m * B + b`` belongs to
            member m.
        num_positions: T, the positions of a row.
        tensors: {parameter name: [M, *shape]}, views of theta.
        trunk: True if the rows of all members are equal before the first random layer, so B rows are enough there.
        fanned_out: True if the current forward has reached a random block or read a random parameter, after which rows
            of members differ.
        num_forwards: the number of forwards that have begun.
        used: names of the random parameters that have been read.
        batch_statistics: True if batch normalisation takes the statistics of a member's rows, as in training, unless
            the members have statistics of their own.
        cuts: id of an input of a trunk block -> the input and its first B rows, in the current forward.
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
        self.batch_statistics = False
        self.cuts: dict[int, tuple[Any, Any]] = {}
        self._copies: Tensor | None = None
        self._fresh = False

    def begin(self, num_rows: int, num_positions: int, *, trunk: bool) -> None:
        """Start a forward with ``num_rows`` rows per member."""
        self.num_rows, self.num_positions, self.trunk = num_rows, num_positions, trunk
        self.num_forwards += 1
        self.end()

    def mark_fanned_out(self, *, copies: bool) -> None:
        """Record that the rows have been repeated M times.

        Args:
            copies: True if the M copies stay equal up to the first stacked module.
        """
        self._fresh = copies

    def end(self) -> None:
        """Clear the state of the current forward."""
        self._copies, self._fresh, self.fanned_out = None, False, False
        self.cuts = {}

    def replayed(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Return the context managers for the first and second run of a checkpointed block (torch's ``context_fn``).

        The second one restores the present state of this object during the recomputation.
        """
        return nullcontext(), _Restored(self)

    def single(self, x: Tensor) -> Tensor | None:
        """Return the B rows of ``x`` that are equal for all members; None if the rows of members may differ.

        ``x`` has B rows already, or M * B rows that are M copies of B rows. Query, key and value projections read the
        same tensor object; the second and third of them recognise the copies by this object. If tokens have been
        flattened into rows (the MLP of OPT), the copies have B * T rows.
        """
        if self.num_members == 1:
            return None
        if x.shape[0] == self.num_rows:
            return x
        if self._fresh:
            self._copies, self._fresh = x, False
        return x[: len(x) // self.num_members] if x is self._copies else None

    def repeat(self, x: Tensor) -> Tensor:
        """Repeat the rows for each member, [B, ...] -> [M * B, ...], member-major."""
        return x.repeat(self.num_members, *[1] * (x.ndim - 1)) if self.num_members > 1 else x


class _Restored:
    """A context manager in which a ``Context`` has the state that it had when this object was made.

    torch enters it once for each recomputation: several times if a graph has several backward passes, and again within
    itself if a recomputed operation runs a backward pass of its own.
    """

    def __init__(self, context: Context) -> None:
        self.context = context
        self.state = {name: value for name, value in vars(context).items() if name != "used"}
        self.before: list[dict[str, Any]] = []

    def __enter__(self) -> None:
        self.before.append(dict(vars(self.context)))
        vars(self.context).update(self.state)

    def __exit__(self, *error: object) -> None:
        vars(self.context).update(self.before.pop())
