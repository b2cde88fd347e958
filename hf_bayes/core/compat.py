"""The private names of torch that tensors are read and drawn with.

``NAMES`` lists them. ``tests/core/test_compat.py`` checks that the installed version has them and does what the
functions below say. Other modules use these functions.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor

NAMES = ("torch._standard_gamma", "torch.Tensor._version", "torch._C.DisableTorchFunctionSubclass")
"""The private names, by their full path."""


def standard_gamma(alpha: Tensor, *, generator: torch.Generator) -> Tensor:
    """Return one draw of Gamma(alpha, 1) for each entry. torch's public distribution takes no generator."""
    return torch._standard_gamma(alpha, generator=generator)


def num_writes(tensor: Tensor) -> int:
    """Return how often a tensor has been written into, as autograd counts it."""
    return tensor._version


def plain_tensor_functions() -> AbstractContextManager[None]:
    """Return a context in which functions of torch treat tensors of a subclass as plain tensors."""
    return torch._C.DisableTorchFunctionSubclass()
