"""The gradient of a log-likelihood on a micro-batch, a few chains at a time.

Training, kernels, the MAP reference, gradient noise and time estimates all take it from ``MemberPasses``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_bayes.core.anchors import at_each_point
from hf_bayes.core.rng import seed_of
from hf_bayes.core.tensors import with_tensors
from hf_bayes.members.inputs import num_rows_of
from hf_bayes.members.mesh import ChainMesh
from hf_bayes.models.base import BayesianModel

SMALL_PASS_ROWS = 512
"""The largest number of rows (members x sequences x positions) at which members are folded in training."""


class MemberPass(NamedTuple):
    """One pass of some members over a micro-batch.

    Attributes:
        members: the chains of the pass.
        loss: [m] minus the log-likelihood of the micro-batch, summed over its terms.
        grad: [m, d] the gradient of the loss; None if it was not requested.
        anchor_grad: [m, d] or [m, J, d] the gradient at the anchor; None without one.
    """

    members: slice
    loss: Tensor
    grad: Tensor | None
    anchor_grad: Tensor | None


def value_and_gradient(
    loss_of: Callable[[Tensor], Tensor], theta: Tensor, *, gradient: bool = True
) -> tuple[Tensor, Tensor | None]:
    """Return losses [m] at ``theta`` [m, d], and the gradient of each in its own row; None if it is not requested.

    This is the only place that differentiates a model's log-likelihood in theta. The passes for the curvature
    differentiate it in the weights of the single model (``curvature_pass``).
    """
    leaf = theta.detach().requires_grad_(gradient)
    with torch.set_grad_enabled(gradient):
        loss = loss_of(leaf)
        if gradient:
            loss.sum().backward()
    return loss.detach(), leaf.grad


@dataclass(frozen=True)
class MemberPasses:
    """The passes of the chains of a process over micro-batches. ``member_passes`` makes one, with defaults.

    For other settings, ``dataclasses.replace`` copies it.

    Attributes:
        model: an attached model.
        mesh: the processes.
        chains: the chains of this process.
        shared: all chains see the same rows. Otherwise a batch has the rows of one chain after the other.
        dropout: dropout is on, as in training.
        seed: the seed of dropout masks, which are a function of seed, chain, step and micro-batch.
        members_per_pass: the number of chains in one pass; None chooses it by the length of a pass.
        context: the context of each forward pass, for autocast.
        prepare: a function that moves a batch to the device.
    """

    model: BayesianModel
    mesh: ChainMesh
    chains: range
    shared: bool
    dropout: bool
    seed: int
    members_per_pass: int | None
    context: Callable[[], AbstractContextManager[Any]]
    prepare: Callable[[Any], Any]

    @property
    def num_groups(self) -> int:
        """The number of groups of rows in a batch: 1 if chains share rows, else the number of chains."""
        return 1 if self.shared else len(self.chains)

    def of_batch(
        self,
        theta: Tensor,
        batch: Any,
        *,
        gradient: bool,
        step: int,
        micro: int,
        chunks: list[slice] | None = None,
        anchor: Tensor | None = None,
    ) -> Iterator[MemberPass]:
        """Yield log-likelihood and gradient of a micro-batch, a few members at a time.

        Args:
            theta: [M, d].
            batch: a batch from ``prepare``.
            step, micro: numbers of the update and of the micro-batch, for dropout masks.
            chunks: the members of each pass; None takes ``member_chunks`` of the batch.
            anchor: [M, d] or [M, J, d] further points at which the gradient is computed, too.
        """

        def at(point: Tensor, rows: dict[str, Any], members: slice) -> tuple[Tensor, Tensor | None]:
            def loss_of(leaf: Tensor) -> Tensor:
                with self.context():
                    loss: Tensor = self.model(**rows, theta=leaf, folded=not self.shared).loss
                return loss

            self._seed_dropout(members, step, micro)
            return value_and_gradient(loss_of, point, gradient=gradient)

        def beside(rows: dict[str, Any], members: slice) -> Tensor | None:
            if anchor is None or not gradient:
                return None
            return at_each_point(anchor[members], lambda point: at(point, rows, members)[1])

        with self._trunk_once(batch, shared=True):
            for members in chunks or self.member_chunks(batch):
                rows = self.rows_of(batch, members)
                with self._trunk_once(rows, shared=False):
                    yield MemberPass(members, *at(theta[members], rows, members), beside(rows, members))

    def member_chunks(self, batch: dict[str, Any]) -> list[slice]:
        """Return the members of each pass: as many together as keep the pass small.

        Arithmetic takes most of the time of long passes. Folding members gains little there, and needs memory for the
        activations of every member. Overhead takes most of the time of short passes, and folded members share it. A
        shared trunk runs once for all passes. With dropout it cannot, so all members then go in one pass.
        """
        count, trunk = len(self.chains), self.model.members.trunk
        rows = num_rows_of(batch) // self.num_groups
        if self.shared and trunk.num_blocks > 0 and self.model.training and trunk.has_dropout:
            size = count
        else:
            size = max(1, SMALL_PASS_ROWS // (rows * self.model.num_positions(batch)))
        size = self.members_per_pass or size
        return [slice(start, min(start + size, count)) for start in range(0, count, size)]

    def rows_of(self, batch: dict[str, Any], members: slice) -> dict[str, Any]:
        """Return the rows of a micro-batch that belong to some members; all rows if they are shared."""
        if self.shared or len(self.chains) == 1 or members == slice(0, len(self.chains)):
            return batch
        rows = num_rows_of(batch) // len(self.chains)
        return self.model.take_rows(batch, torch.arange(members.start * rows, members.stop * rows))

    def _trunk_once(self, batch: dict[str, Any], *, shared: bool) -> AbstractContextManager[None]:
        """Return a context in which the trunk runs once for a batch, if the rows of the run are shared like these."""
        trunk = self.model.members.trunk
        if shared != self.shared or (self.model.training and trunk.has_dropout):
            return nullcontext()
        return trunk.run_once(batch)

    def _seed_dropout(self, members: slice, step: int, micro: int) -> None:
        """Make dropout masks a function of seed, chain, step and micro-batch, so that a resumed run draws the same."""
        if self.model.training and self.model.members.trunk.has_dropout:
            place = (self.chains[members.start], self.mesh.data_rank, step, micro)
            torch.manual_seed(seed_of(self.seed, "dropout", *place))


def member_passes(
    model: BayesianModel,
    *,
    mesh: ChainMesh | None = None,
    chains: range | None = None,
    shared: bool = True,
    dropout: bool = False,
    seed: int = 0,
    members_per_pass: int | None = None,
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    prepare: Callable[[Any], Any] | None = None,
) -> MemberPasses:
    """Return the passes of the chains of this process.

    Args:
        model, shared, dropout, seed, members_per_pass, context: fields of ``MemberPasses``.
        mesh: the processes; None is this one alone.
        chains: the chains of this process; None: all chains that the mesh gives to it.
        prepare: a function that moves a batch to the device; None moves it to the device of the model.
    """
    mesh = ChainMesh(len(model.theta), model.device) if mesh is None else mesh
    chains = mesh.chains if chains is None else chains
    prepare = prepare or partial(_to_device, model)
    return MemberPasses(model, mesh, chains, shared, dropout, seed, members_per_pass, context, prepare)


def _to_device(model: BayesianModel, batch: Any) -> Any:
    """Return a batch with its tensors on the device of a model."""
    return with_tensors(batch, lambda tensor: tensor.to(model.device))
