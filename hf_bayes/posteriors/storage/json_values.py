"""Python values -> JSON values: sets, enums, tensors, numpy scalars and paths become plain data."""

from __future__ import annotations

import enum
import math
import os
from collections.abc import Collection, Mapping
from functools import singledispatch
from typing import Any, NamedTuple

import torch

from hf_bayes.posteriors.storage.formats import MAX_DEPTH, too_deep

_SIMPLE = frozenset({bool, int, str, type(None)})


class _Place(NamedTuple):
    """The place of a value within the value that ``json_value`` converts.

    Attributes:
        where: the path to the value, such as "config.a[1]".
        undefined_is_null: NaN and infinities become None.
        depth: the number of lists and mappings around the value.
    """

    where: str
    undefined_is_null: bool
    depth: int = 0

    def inside(self, step: str) -> _Place:
        return _Place(self.where + step, self.undefined_is_null, self.depth + 1)


def json_value(value: Any, where: str, *, undefined_is_null: bool = False) -> Any:
    """Return the JSON value of a Python value: sets sorted, enums by value, tensors and numpy scalars as numbers.

    Args:
        value: any Python value.
        where: the name of the value in an error.
        undefined_is_null: NaN and infinities become None instead of an error.
    Raises:
        ValueError: naming the entry that is not plain data, or that is nested too deep.
    """
    return _json_value(value, _Place(where, undefined_is_null))


def json_fields(values: Mapping[str, Any], *, undefined_is_null: Collection[str] = ()) -> dict[str, Any]:
    """Return name -> JSON value of each field. NaN and infinities become None in the fields named last."""
    return {name: _json_value(value, _Place(name, name in undefined_is_null)) for name, value in values.items()}


def _json_value(value: Any, place: _Place) -> Any:
    if place.depth > MAX_DEPTH:
        raise ValueError(too_deep(place.where.partition(".")[0].partition("[")[0]))
    # Before the dispatch: an enum of texts or of integers is an instance of str or int, too.
    return _json_value(value.value, place) if isinstance(value, enum.Enum) else _converted(value, place)


@singledispatch
def _converted(value: Any, place: _Place) -> Any:
    if hasattr(value, "tolist"):  # a tensor, an array or a numpy scalar
        return _json_value(value.tolist(), place)
    raise ValueError(f"{place.where} holds a {type(value).__name__}, expected numbers, texts, lists or mappings")


@_converted.register(type(None))
@_converted.register(int)
@_converted.register(str)
def _unchanged(value: Any, place: _Place) -> Any:
    return value


@_converted.register
def _finite(value: float, place: _Place) -> float | None:
    if math.isfinite(value):
        return float(value)  # numpy's double is an instance of float
    if place.undefined_is_null:
        return None
    raise ValueError(f"{place.where} must be finite, got {value}")


@_converted.register(Mapping)
def _object(value: Mapping[Any, Any], place: _Place) -> dict[str, Any]:
    return {str(key): _json_value(entry, place.inside(f".{key}")) for key, entry in value.items()}


@_converted.register(set)
@_converted.register(frozenset)
def _sorted(value: set[Any] | frozenset[Any], place: _Place) -> list[Any]:
    return sorted(_json_value(entry, place.inside("")) for entry in value)


@_converted.register(list)
@_converted.register(tuple)
def _list(value: list[Any] | tuple[Any, ...], place: _Place) -> list[Any]:
    if set(map(type, value)) <= _SIMPLE:  # long lists are numbers or names
        return list(value)
    return [_json_value(entry, place.inside(f"[{index}]")) for index, entry in enumerate(value)]


@_converted.register(os.PathLike)
def _path(value: os.PathLike[str], place: _Place) -> str:
    return os.fspath(value)


@_converted.register
def _dtype(value: torch.dtype, place: _Place) -> str:
    return str(value).removeprefix("torch.")
