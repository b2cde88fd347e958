"""The two forms of theta in ``sample``: one tensor [M, d], or a dictionary of named tensors {name: [M, *shape]}.

Chains always hold theta as one tensor. A ``Form`` turns it into the form that the user's energy takes and that draws
are returned in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic

from torch import Tensor
from typing_extensions import TypeVar

from hf_bayes.core.layout import Layout
from hf_bayes.core.tensors import shape_in_words
from hf_bayes.core.types import UNNAMED

Theta = TypeVar("Theta", Tensor, dict[str, Tensor], default=Tensor)
"""The type of theta: a tensor, or a dictionary of named tensors."""

Aux = Tensor | Mapping[str, Tensor]
"""The further output of an energy: a tensor [M, ...], or named ones."""

Energy = Callable[[Theta, Any], Tensor | tuple[Tensor, Aux]]
"""(theta, batch) -> U [M] in nats, or (U, aux); batch is None when ``batches`` is None."""


@dataclass(frozen=True)
class Form(Generic[Theta]):
    """The form in which the user gives theta.

    Attributes:
        layout: the named tensors; None if theta is one tensor.
    """

    layout: Layout | None

    @classmethod
    def of(cls, theta: Theta) -> tuple[Form[Theta], Tensor]:
        """Return the form of a starting point, and the point as one tensor [M, d] (or [d], if theta is one).

        Raises:
            ValueError: for a dictionary without tensors, or whose tensors have no common first axis, dtype or device.
        """
        if isinstance(theta, Tensor):
            return cls(None), theta
        if not isinstance(theta, Mapping):
            raise ValueError(
                f"theta must be a tensor [M, d] or [d], or a dictionary {{name: [M, *shape]}}, got "
                f"{type(theta).__name__}: torch.tensor makes a tensor"
            )
        _check_named(theta)
        layout = Layout(tuple(theta), tuple(tuple(tensor.shape[1:]) for tensor in theta.values()))
        return cls(layout), layout.flatten(theta)

    def unflatten(self, theta: Tensor) -> Theta:
        """Return views of theta [..., d] in the user's form."""
        found: Any = theta if self.layout is None else self.layout.unflatten(theta)
        return found  # type: ignore[no-any-return]

    def shapes(self, dim: int) -> dict[str, tuple[int, ...]]:
        """Return name -> shape of each tensor, see ``Problem.shapes``."""
        return {UNNAMED: (dim,)} if self.layout is None else self.layout.named_shapes

    def place_of(self, column: int) -> str:
        """Return ", " and the name of the tensor that holds a column of theta; "" if it has no name."""
        return "" if self.layout is None else f", {self.layout.name_at(column)}"


def _check_named(theta: Mapping[str, Tensor]) -> None:
    """Raise unless the tensors of a starting point have names, and M, dtype and device in common."""
    if not theta:
        raise ValueError("theta is an empty dictionary: give {name: tensor [M, *shape]}")
    for name, tensor in theta.items():
        if not isinstance(name, str) or not name:
            raise ValueError(f"theta has the name {name!r}: names must be texts that are not empty")
        if not isinstance(tensor, Tensor) or tensor.ndim == 0:
            raise ValueError(
                f"theta[{name!r}] must be a tensor [M, *shape], one starting point per chain, got "
                f"{shape_in_words(tensor)}: for one chain, tensor[None] adds the axis"
            )
    for what in ("first axis", "dtype", "device"):
        found = {
            name: {"first axis": len(tensor), "dtype": tensor.dtype, "device": tensor.device}[what]
            for name, tensor in theta.items()
        }
        if len(set(found.values())) > 1:
            raise ValueError(
                f"the tensors of theta must have one {what} (the first axis is M, the number of chains), got {found}"
            )
