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
            # once the members differ, B rows are a table, such as DeBERTa's with B = 1
            self.require_member_rows(x, also=None if context.fanned_out else context.num_rows)
        return context.single(x)

    def require_member_rows(self, x: Tensor, *, also: int | None) -> None:
        """Check that ``x`` has M * B rows, or ``also``; otherwise rows cannot be assigned to members.

        Raises:
            ValueError: naming a parameter of the module.
        """
        context = self.context
        if context.num_members > 1 and x.shape[0] not in (context.num_members * context.num_rows, also):
            raise ValueError(self.shuffled(f"{x.shape[0]} rows"))

    def shuffled(self, found: str) -> str:
        """Return the message about a call with ``found``, whose rows cannot be assigned to members."""
        members, rows = self.context.num_members, self.context.num_rows
        return (
            f"{next(iter(self.names.values()))}: its module was called with {found}, expected {members * rows} "
            f"({members} members x {rows}): the model shuffles rows (experts, windows or patches of an image), or "
            "calls it on a table. Leave it out of the subspace (for a LoRA on DeBERTa: "
            "target_modules=['value_proj', 'dense']), or run one member at a time: members_per_pass=1 in the training "
            "arguments, model.members_per_pass = 1 for predictions"
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
