"""Groups of operations of torch that the structures treat alike, and questions about their arguments."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_bayes.models.single_pass.gaussian_tensor import NoRule, gaussian_tensors_in, name_of, spread_of

RESHAPES = (
    Tensor.view, Tensor.reshape, torch.reshape, Tensor.contiguous, Tensor.flatten, torch.flatten, Tensor.clone,
    torch.clone, Tensor.detach, Tensor.unsqueeze, Tensor.squeeze,
)  # fmt: skip
"""Operations that may leave the last dimension as it is."""

ARRANGEMENTS = (
    *RESHAPES, Tensor.transpose, torch.transpose, Tensor.permute, torch.permute, torch.unsqueeze, torch.squeeze,
    Tensor.expand, Tensor.expand_as, Tensor.unflatten, torch.unflatten, Tensor.movedim, torch.movedim, Tensor.repeat,
    Tensor.view_as, getattr(Tensor.mT, "__get__"),  # noqa: B009 - mypy takes the property for a tensor
)  # fmt: skip
"""Operations whose results are the elements of one tensor in another arrangement."""

CONVERSIONS = (Tensor.to, Tensor.float, Tensor.type, Tensor.type_as, Tensor.half, Tensor.bfloat16, Tensor.double)

SUMS = (
    torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, torch.sub, Tensor.sub, Tensor.__sub__, Tensor.__rsub__,
    Tensor.__iadd__, Tensor.add_,
)  # fmt: skip
"""Sums and differences of two tensors."""

SOFTMAX = (F.softmax, torch.softmax, Tensor.softmax)

PRODUCTS = (torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__)

QUOTIENTS = (torch.div, Tensor.div, Tensor.__truediv__)

ACTIVATIONS = (
    F.relu, torch.relu, Tensor.relu, F.gelu, F.silu, F.tanh, torch.tanh, Tensor.tanh, F.sigmoid, torch.sigmoid,
    Tensor.sigmoid, F.softplus, F.elu, F.mish, F.leaky_relu, F.hardswish, F.relu6,
)  # fmt: skip
"""Elementwise functions of one tensor."""


def certain_weight(args: Any, kwargs: dict[str, Any]) -> Tensor:
    """Return the weight among the arguments of ``F.linear``.

    Raises:
        NoRule: if it is a Gaussian tensor.
    """
    weight: Tensor = args[1] if len(args) > 1 else kwargs["weight"]
    if spread_of(weight) is not None:
        raise NoRule("a linear layer with an uncertain weight")
    return weight


def num_uncertain(args: Any) -> int:
    """Return the number of Gaussian tensors among arguments."""
    return sum(1 for _ in gaussian_tensors_in(args))


def is_one_number(factor: Any) -> bool:
    """Check for a number, or a tensor with one element."""
    return not isinstance(factor, Tensor) or factor.numel() <= 1


def as_tuple(index: Any) -> tuple[Any, ...]:
    """Return an index of one dimension or of several as a tuple."""
    return index if isinstance(index, tuple) else (index,)


def index_of_each(function: Any, args: Any, num_dims: int) -> list[Any] | None:
    """Return what an indexing operation takes from each dimension of its tensor; new dimensions are left out.

    Args:
        function: the indexing with brackets, ``select`` or ``narrow``.
        args: its arguments, the tensor first.
        num_dims: the number of dimensions of the tensor.
    Returns:
        One index for each dimension, ``slice(None)`` for a dimension that is taken as a whole. None if the dimensions
        cannot be told apart: for several indices that are tensors, which become one dimension, or for a mask of several
        dimensions.
    """
    found: list[Any] = [slice(None)] * num_dims
    if "getitem" not in name_of(function):
        if len(args) < 3:
            return None
        dim, start = args[1:3]
        found[dim] = slice(start, start + args[3]) if "narrow" in name_of(function) else start
        return found
    given = [item for item in as_tuple(args[1]) if item is not None]
    lists = [item for item in given if isinstance(item, (Tensor, list))]
    if len(lists) > 1 or any(torch.as_tensor(item).ndim != 1 for item in lists):
        return None
    place = next((index for index, item in enumerate(given) if item is Ellipsis), len(given))
    before, behind = given[:place], given[place + 1 :]
    found[:place] = before
    found[num_dims - len(behind) :] = behind
    return found
