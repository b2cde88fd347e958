"""The check, in the first pass of a model, that it reads its random parameters through their modules only.

A model may read a weight past its module's forward, as DeBERTa reads the table of relative positions. Then all members
would get the value of the base model, and their uncertainty would leave this parameter out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_METADATA = (
    "zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like",
    "new_zeros", "new_ones", "new_empty", "new_full",
)  # fmt: skip
"""Functions that take the dtype, the device or the shape of a tensor, and none of its values."""

_LIKE = ("to", "type_as", "expand_as", "view_as", "reshape_as")
"""Functions that take the values of the first tensor, and the dtype, the device or the shape of the second."""


class ReadsOutsideModules(TorchFunctionMode):
    """A context in which functions of torch record each random parameter whose values they are given.

    Stacked modules compute with the members' tensors, so they never give a random parameter to a function.

    Args:
        model: the model with the parameters.
        names: the names of the random ones.

    Attributes:
        found: the names of the parameters that have been read.
    """

    def __init__(self, model: nn.Module, names: Collection[str]) -> None:
        super().__init__()
        parameters = model.named_parameters(remove_duplicate=False)
        wanted = set(names)
        self.names = {id(parameter): name for name, parameter in parameters if name in wanted}
        self.found: set[str] = set()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.compiler.is_compiling():  # a compiled block is not checked: torch would compile the check, too
            return result
        name = getattr(func, "__name__", "")
        # weight.dtype and weight.shape are no tensors, and neither is the result of x[0] = weight
        if name == "__setitem__" or (name not in _METADATA and any(True for _ in _tensors(result))):
            read = args[:1] if name in _LIKE else (args, kwargs)
            self.found |= {self.names[id(tensor)] for tensor in _tensors(read) if id(tensor) in self.names}
        return result

    def check(self) -> None:
        """Raise a ValueError that names a parameter which was read outside its module."""
        if self.found:
            raise ValueError(
                f"{len(self.found)} random parameters were read outside their module, first {min(self.found)}: there "
                "all members would have the value of the base model. Leave them out of the subspace"
            )


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested tuples, lists and dicts."""
    match value:
        case Tensor():
            yield value
        case list() | tuple():
            for item in value:
                yield from _tensors(item)
        case dict():
            yield from _tensors(list(value.values()))
