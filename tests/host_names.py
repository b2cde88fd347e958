"""The check that the installed version of a host library has a private name as a compat module lists it."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

from hf_bayes.core.compat import PrivateName


def found_at(path: str) -> Any:
    """Return the module, class or function with this full path."""
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(path)


def parameters_of(function: Any) -> tuple[str, ...]:
    """Return the parameters of a function or method, without ``self``."""
    return tuple(name for name in inspect.signature(function).parameters if name != "self")


def fault_of(entry: PrivateName, examples: Mapping[str, Callable[[], Any]] | None = None) -> str:
    """Return what the installed version has instead of a listed name; empty if it has the name as listed.

    A name without parameters is an attribute of its owner, or of an object of this class. An argument stands in the
    owner's source, and so does a name that our classes provide, which the owner does not have.

    Args:
        examples: {owner: a function that makes an object of this class}.
    """
    owner = found_at(entry.owner)
    if entry.parameters is not None:
        found = parameters_of(getattr(owner, entry.name))
        return "" if found == entry.parameters else f"parameters {found}"
    if entry.use in ("argument", "provided"):
        if hasattr(owner, entry.name):
            return "a name of its own"
        return "" if re.search(rf"\b{entry.name}\b", inspect.getsource(owner)) else "a source without it"
    if hasattr(owner, entry.name):
        return ""
    if examples and entry.owner in examples:
        return "" if hasattr(examples[entry.owner](), entry.name) else "an object without it"
    return "an owner without it"


def label(entry: PrivateName) -> str:
    """Return the identifier of a test of this name."""
    return f"{entry.owner.rpartition('.')[2]}.{entry.name}"
