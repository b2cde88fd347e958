"""A live model with a member axis: installed in place, run folded, given back as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hf_bayes.core.layout import Layout
from hf_bayes.members.checkpointing import Checkpointing
from hf_bayes.members.context import Context
from hf_bayes.members.last_feed_forward import Tail
from hf_bayes.members.small_batches import FewRows
from hf_bayes.members.stacked import stack
from hf_bayes.members.trunk import Trunk, num_positions_of, num_rows_of, repeat_rows

FOLDED_ROWS = 1024
"""Rows (members x sequences x positions) past which folding loses to smaller passes, whose activations fit the caches:
on two cores the 8 x 512 rows of 8 Llamas of 30M parameters take 10 % less time by 1024 than at once."""


class Members:
    """The member engine on one model.

    ``install`` replaces the forwards of the modules that own a random parameter and hooks the trunk; ``remove`` undoes
    both. In between, ``bind`` shows members to the model and ``forward`` runs it for all of them at once.

    Attributes:
        model: what the layout's names refer to (a peft model, say).
        core: the transformers model that is called.
        layout: the random parameters.
        attached: whether the model has its member axis now.
    """

    def __init__(self, model: nn.Module, core: nn.Module, layout: Layout, *, trunk: bool = True) -> None:
        self.model, self.core, self.layout = model, core, layout
        self.attached = False
        self.context = Context()
        parameters = dict(model.named_parameters(remove_duplicate=False))
        names = {id(parameters[name]): name for name in layout.names}
        self.stacked = stack(model, names, self.context)
        self.trunk = Trunk(core, [item.module for item in self.stacked], self.context)
        if not trunk:
            self.trunk.num_blocks = 0
        self.tail = Tail(core, self.context)
        self.few_rows = FewRows(core, [item.module for item in self.stacked])
        self.checkpointing = Checkpointing(core, self.context)
        self._viewed: tuple[Tensor, Any, dict[str, Tensor]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """For copies: views would hold each a whole theta, and be known by where the original's lies."""
        return {**self.__dict__, "_viewed": None}

    @property
    def num_trunk_blocks(self) -> int:
        """Blocks that run once for all members, and whose caches hold B rows."""
        return self.trunk.num_blocks

    def install(self) -> None:
        self.attached = True
        self.checkpointing.install()
        for item in self.stacked:
            item.install()
        self.trunk.install()
        self.tail.install()
        self.few_rows.install()

    def remove(self) -> None:
        self.attached = False
        for item in self.stacked:
            item.remove()
        self.trunk.remove()
        self.tail.remove()
        self.few_rows.remove()
        self.checkpointing.remove()
        self.context.tensors, self._viewed = {}, None

    def require_attached(self) -> None:
        """Raise if the member axis has been removed: the plain model would answer for every member alike, with EU 0.

        Every way to the members passes here: ``bind`` and ``plain``, and before these ``BayesianModel.show`` and
        whatever predicts (``model.predicts``).
        """
        if not self.attached:
            raise ValueError(
                f"this BayesianModel was detached: its {type(self.core).__name__} has been given back and has no "
                "members. Give it a member axis again (hf_bayes.attach(model, theta)), load the posterior anew "
                "(from_pretrained), or ask within the `with attach(...)` block"
            )

    @contextmanager
    def bind(self, theta: Tensor) -> Iterator[None]:
        """Show the members ``theta`` [M, d] to the model until the end of the block."""
        self.require_attached()
        context = self.context
        before = context.tensors, context.num_members
        context.tensors, context.num_members = self._views(theta), len(theta)
        try:
            yield
        finally:
            context.tensors, context.num_members = before

    def _views(self, theta: Tensor) -> dict[str, Tensor]:
        """{name: [M, *shape]}; made once for members that are shown again and again, token after token."""
        if theta.requires_grad and torch.is_grad_enabled():
            return self.layout.unflatten(theta)
        kind = theta.data_ptr(), theta.shape, theta.dtype, torch.is_inference_mode_enabled()
        if self._viewed is None or self._viewed[0] is not theta or self._viewed[1] != kind:
            self._viewed = theta, kind, self.layout.unflatten(theta)
        return self._viewed[2]

    def forward(self, inputs: dict[str, Any], *, folded: bool = False, module: nn.Module | None = None) -> Any:
        """The output of the core (or of ``module``, a part of it) with M * B rows, row ``m * B + b`` of member m.

        Args:
            inputs: keyword arguments of the core.
            folded: the rows differ from member to member: there are M * B of them already.
            module: what to call in place of the core.
        """
        members, rows = self.context.num_members, num_rows_of(inputs)
        if folded:
            if rows % members:
                raise ValueError(f"{rows} rows cannot be dealt to {members} members: give a multiple")
            rows //= members
        else:
            inputs = repeat_rows(inputs, rows, members)
        return self.run(module or self.core, inputs, rows, num_positions_of(inputs), trunk=not folded and members > 1)

    def logits(self, inputs: dict[str, Any], *, folded: bool = False) -> Tensor:
        """[M, B, ..., C] of a core with a head; arguments as of ``forward``."""
        output = self.forward(inputs, folded=folded)
        if getattr(output, "logits", None) is None:
            raise ValueError(
                f"{type(self.core).__name__} answers no logits: give a model with a head, such as "
                "AutoModelForSequenceClassification loads"
            )
        return output.logits.unflatten(0, (self.context.num_members, -1))

    def run(
        self, module: nn.Module, inputs: dict[str, Any], num_rows: int, num_positions: int, *, trunk: bool = False
    ) -> Any:
        """Call a module whose inputs are folded already, ``num_rows`` rows a member."""
        self.context.begin(num_rows, num_positions, trunk=trunk)
        try:
            return module(**inputs)
        finally:
            self.context.end()

    def pass_size(self, num_members: int, rows: int, length: int) -> int:
        """Members to run at once so that about ``FOLDED_ROWS`` rows are folded."""
        return max(1, min(num_members, FOLDED_ROWS // max(1, rows * length)))

    def chunks(self, theta: Tensor, size: int) -> Iterator[Tensor]:
        """``theta`` in pieces of at most ``size`` members of nearly equal number."""
        count = -(-len(theta) // size)
        yield from (theta,) if count == 1 else torch.tensor_split(theta, count)  # itself: its views are kept

    def check_all_read(self) -> None:
        """To be called after a whole forward: a random parameter that it did not read has no posterior.

        Raises:
            ValueError: naming one that the model uses behind its module's back, or not at all.
        """
        unread = sorted(set(self.layout.names) - self.context.used)
        if unread:
            raise ValueError(
                f"{len(unread)} random parameters were not read in a forward pass, first {unread[0]}: the model uses "
                "them outside their module, or not at all. Leave them out of the subspace"
            )
