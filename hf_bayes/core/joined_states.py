"""The state of a method that wraps another method: the fields of both in one flat NamedTuple of tensors.

A method may also wrap several others, each with some of the chains: ``rows_of`` and ``merged`` take states apart and
put them together again by chains.
"""

from __future__ import annotations

import functools
from collections import namedtuple
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from torch import Tensor

EVERY_ROW = slice(0, None, 1)


def joined_state(own: Mapping[str, Tensor], inner: Any, *, prefix: str = "") -> Any:
    """Return the state with the fields ``own`` and those of ``inner``.

    Args:
        own: name -> tensor, the fields of the outer method. A field of ``inner`` with the same name is left out, so it
            must hold the same values.
        inner: the state of the inner method, a NamedTuple.
        prefix: the beginning of the names of the inner fields.
    """
    inner_kind: Any = type(inner)
    kind = _joined_type(tuple(own), inner_kind, prefix)
    fields = {f"{prefix}{name}": value for name, value in inner._asdict().items()}
    return kind(**{**fields, **own})


def inner_state(state: Any) -> Any:
    """Return the state of the inner method, with its current values."""
    kind, prefix = type(state).inner, type(state).prefix
    return kind(**{name: getattr(state, f"{prefix}{name}") for name in kind._fields})


def with_inner(state: Any, inner: Any) -> Any:
    """Return the joined state with the values of ``inner``, a state of the inner method."""
    prefix = type(state).prefix
    return state._replace(**{f"{prefix}{name}": value for name, value in inner._asdict().items()})


@functools.cache
def _joined_type(own: tuple[str, ...], inner: Hashable, prefix: str) -> Any:
    fields: tuple[str, ...] = inner._fields  # type: ignore[attr-defined]
    names = [f"{prefix}{name}" for name in fields]
    flat = namedtuple("JoinedState", [*own, *(name for name in names if name not in own)])  # type: ignore[misc]
    return type("JoinedState", (flat,), {"__slots__": (), "inner": inner, "prefix": prefix})


def rows_of(values: Any, rows: slice) -> Any:
    """Return some rows of a NamedTuple of tensors, as views; None stays."""
    if rows == EVERY_ROW:
        return values
    return type(values)(*(value if value is None or value.ndim == 0 else value[rows] for value in values))


def merged(parts: Sequence[tuple[slice, Any]]) -> Any:
    """Return the state of all chains from (rows, state of these chains)."""
    kind: Any = type(parts[0][1])
    return kind(*(scattered([(rows, part[place]) for rows, part in parts]) for place in range(len(kind._fields))))


def scattered(parts: Sequence[tuple[slice, Tensor]]) -> Tensor:
    """Return the tensors of groups of rows as one, each row at its place."""
    first = parts[0][1]
    if len(parts) == 1:
        return first
    whole = first.new_empty(sum(len(value) for _, value in parts), *first.shape[1:])
    for rows, value in parts:
        whole[rows] = value
    return whole
