"""The private names of torch that the package reads or overrides, and the record that describes such names.

``NAMES`` lists them; a module for each other host library has such a list, too. Tests compare every list with the
installed versions. Other modules use the functions below.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

Use = Literal["called", "read", "replaced", "overridden", "provided", "argument", "accepted", "refused"]
"""The uses that the package makes of a name of a host.

It calls a function, reads an attribute, or replaces its value. A class of ours overrides a name of the host's class, or
provides a name that the host looks for and does not define itself. An argument is a name that a function of the host
takes or passes. A class of the user may define the name (accepted) or must not (refused).
"""


class PrivateName(NamedTuple):
    """A name of a host library that is private, or public without a documented contract.

    Attributes:
        owner: the module, class or function that has the name, by its full path.
        name: the attribute, method, function or argument.
        parameters: all parameters of a method or function, without ``self``. None for everything else.
        use: what the package does with it.
    """

    owner: str
    name: str
    parameters: tuple[str, ...] | None
    use: Use


_MODULE = "torch.nn.Module"

NAMES = (
    PrivateName("torch", "_standard_gamma", None, "called"),
    PrivateName("torch.Tensor", "_version", None, "read"),
    PrivateName("torch._C", "DisableTorchFunctionSubclass", None, "called"),
    PrivateName("torch.nn.modules.batchnorm", "_BatchNorm", None, "read"),
    PrivateName("torch.nn.modules.dropout", "_DropoutNd", None, "read"),
    PrivateName(_MODULE, "_apply", ("fn", "recurse"), "overridden"),
    # forward_with relies on it: entries of the instance's dictionary are found before parameters
    PrivateName(_MODULE, "__getattr__", ("name",), "called"),
)
"""The private names of torch."""

BATCH_NORM, DROPOUT = _BatchNorm, _DropoutNd
"""torch's base classes of layers that normalise over a batch, and of layers that drop inputs."""


def standard_gamma(alpha: Tensor, *, generator: torch.Generator) -> Tensor:
    """Return one draw of Gamma(alpha, 1) for each entry. torch's public distribution takes no generator."""
    return torch._standard_gamma(alpha, generator=generator)


def num_writes(tensor: Tensor) -> int:
    """Return how often a tensor has been written into, as autograd counts it."""
    return tensor._version


def plain_tensor_functions() -> AbstractContextManager[None]:
    """Return a context in which functions of torch treat tensors of a subclass as plain tensors."""
    return torch._C.DisableTorchFunctionSubclass()


def forward_with(module: nn.Module, values: dict[str, Tensor], x: Tensor) -> Tensor:
    """Run the forward of the module's class, without hooks, with ``values`` in place of its parameters."""
    try:
        module.__dict__.update(values)  # found before nn.Module.__getattr__ looks among the parameters
        result: Tensor = type(module).forward(module, x)
        return result
    finally:
        for name in values:
            module.__dict__.pop(name, None)
