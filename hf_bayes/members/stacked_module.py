"""The base class of stacked modules: the replacement of a module's forward by one that reads the members' tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from hf_bayes.members.context import Context


class Stacked:
    """The replacement of a module's forward. Subclasses define ``forward`` with the members' tensors."""

    def __init__(self, module: Any, names: Mapping[str, str], context: Context) -> None:
        self.module, self.names, self.context = module, dict(names), context
        self.before = vars(module).get("forward")  # accelerate may have replaced the forward as well

    def single(self, x: Tensor) -> Tensor | None:
        """Return the B rows of ``x`` that are equal for all members, else None (see ``Context.single``)."""
        context = self.context
        # a head that scores tokens flattens them into rows
        if x.ndim != 2 or x.shape[0] != context.num_members * context.num_rows * context.num_positions:
            self.require_rows(x, also=context.num_rows)
        return context.single(x)

    def require_rows(self, x: Tensor, *, also: int) -> None:
        """Check that ``x`` has M * B rows, or ``also``; otherwise rows cannot be assigned to members.

        Raises:
            ValueError: naming a parameter of the module.
        """
        context = self.context
        expected = context.num_members * context.num_rows
        if context.num_members > 1 and x.shape[0] not in (expected, also):
            raise ValueError(
                f"{next(iter(self.names.values()))}: its module was called with {x.shape[0]} rows, expected {expected} "
                f"({context.num_members} members x {context.num_rows}): the model shuffles rows (experts), or calls it "
                "on a table. Leave it out of the subspace"
            )

    def tensor(self, attribute: str) -> Tensor:
        """Return a parameter of the module as [M, *shape]. A frozen parameter is the same for all members."""
        context, name = self.context, self.names.get(attribute)
        if name is None:
            parameter = self.parameter(attribute).detach()  # frozen
            return parameter.expand(context.num_members, *parameter.shape)
        tensor = context.tensors.get(name)
        if tensor is None:
            raise RuntimeError(f"{name} is random: call the BayesianModel that holds this model, or detach() it first")
        context.used.add(name)
        context.fanned_out = True
        return tensor

    def parameter(self, attribute: str) -> Tensor:
        """Return a parameter of the module by the name of its attribute."""
        parameter: Tensor = getattr(self.module, attribute)
        return parameter

    def install(self) -> None:
        """Replace the module's forward."""
        self.module.forward = self.forward  # an instance attribute shadows the class's forward; deepcopy rebinds it

    def remove(self) -> None:
        """Restore the module's forward."""
        vars(self.module).pop("forward", None)
        if self.before is not None:
            self.module.forward = self.before

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        raise AssertionError("a Stacked module defines forward")
