"""The log-likelihood of a Bayesian model on rows of data, as the objective of a run.

Training, kernels, the MAP reference, gradient noise and time estimates all take the gradient of a micro-batch from
``ModelObjective.passes``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from hf_bayes.chains.objective import FailureWords
from hf_bayes.core.anchors import at_each_point
from hf_bayes.core.rng import seed_of
from hf_bayes.core.tensors import with_tensors
from hf_bayes.core.types import Evaluation, RowScores
from hf_bayes.members.inputs import num_rows_of
from hf_bayes.members.mesh import ChainMesh
from hf_bayes.methods.laplace.supported import CurvatureSpec
from hf_bayes.models.base import BayesianModel
from hf_bayes.objectives.all_rows import gradient_of_all_rows
from hf_bayes.objectives.curvature_pass import CurvaturePassResult, run_curvature_pass
from hf_bayes.objectives.data_access import DataAccess
from hf_bayes.objectives.data_scale import DataScale
from hf_bayes.objectives.heldout import HeldOutRows
from hf_bayes.objectives.model_of_update import ModelOfUpdate
from hf_bayes.objectives.passes import MemberPass, value_and_gradient
from hf_bayes.objectives.private_rows import PrivateRows

SMALL_PASS_ROWS = 512
"""The largest number of rows (members x sequences x positions) at which members are folded in training."""


class ModelObjective:
    """The log-likelihood of a model for the chains of this process, its gradient, and passes over all data.

    Args:
        model: an attached model.
        scale: the size of the data and of an update.
        mesh: the processes; None is this one alone.
        chains: the chains of this process; None: all chains of the mesh.
        dropout: dropout is on, as in training.
        shared: all chains see the same rows. Otherwise a batch has the rows of one chain after the other.
        in_float64: log-likelihoods stay in float64, because kernels compare energies.
        returns_batches: an evaluation has ``batch_log_lik``.
        measures_noise: an evaluation with a gradient has ``grad_variance``, from its micro-batches.
        seed: the seed of dropout masks, which are a function of seed, chain, step and micro-batch.
        members_per_pass: the number of chains in one pass; None chooses it by the length of a pass.
        private: the rows of this process, if processes keep their rows to themselves; otherwise None.
        context: the context of each forward pass, for autocast.
        prepare: a function that moves a batch to the device.
        data: rows by number; None if no method needs them.
    """

    words = FailureWords(
        "log-likelihood",
        "gradient of the log-likelihood",
        "step",
        "nothing of this step is kept. Lower learning_rate, check the data and the model's weights for NaN, or resume "
        "from the last checkpoint",
    )

    def __init__(
        self,
        model: BayesianModel,
        scale: DataScale,
        *,
        mesh: ChainMesh | None = None,
        shared: bool = True,
        chains: range | None = None,
        dropout: bool = False,
        in_float64: bool = False,
        returns_batches: bool = False,
        measures_noise: bool = False,
        seed: int = 0,
        members_per_pass: int | None = None,
        private: PrivateRows | None = None,
        context: Callable[[], AbstractContextManager[Any]] = nullcontext,
        prepare: Callable[[Any], Any] | None = None,
        data: DataAccess | None = None,
    ) -> None:
        self.model, self.scale, self.shared, self.seed = model, scale, shared, seed
        self.mesh = ChainMesh(len(model.theta), model.device) if mesh is None else mesh
        self.chains = self.mesh.chains if chains is None else chains
        self.dropout, self.in_float64 = dropout, in_float64
        self.returns_batches, self.measures_noise = returns_batches, measures_noise
        self.members_per_pass, self.private, self.context = members_per_pass, private, context
        self.prepare, self.data = prepare or self._to_device, data
        self._heldout: HeldOutRows | None = None
        own = getattr(getattr(model.likelihood, "config", None), "advice", "")
        if own:  # a user's likelihood adds its advice
            self.words = self.words._replace(cause=f". {own}")

    # -- what a run calls ------------------------------------------------------------------------------------------

    def for_update(self, batches: list[Any], *, step: int, inside: Tensor | None = None) -> ModelOfUpdate:
        """Return the log-likelihood on the micro-batches of one update, see ``chains.objective.Objective``."""
        self.model.train(self.dropout)
        return ModelOfUpdate(self, batches, step, self.terms_of(batches))

    def evaluate(self, theta: Tensor, batches: list[Any], *, gradient: bool = True) -> Evaluation:
        """Return log-likelihood and gradient at ``theta`` [M, d], estimated from the batches of one update."""
        return self.for_update(batches, step=0)(theta, gradient=gradient)

    def place_of(self, column: int) -> str:
        """Return ", " and the name of the parameter that holds a column of theta."""
        for name, size in zip(self.model.layout.names, self.model.layout.sizes, strict=True):
            if column < size:
                return f", {name}"
            column -= size
        raise AssertionError("theta has no such column")

    # -- more passes over the data, for a method that needs them (``core.types.DataPasses``) ------------------------

    def curvature(self, theta: Tensor, spec: CurvatureSpec, *, gradient: bool = True) -> CurvaturePassResult:
        """Return log-likelihood, gradient and curvature of all training data at ``theta`` [d]."""
        assert self.data is not None
        assert self.scale.num_terms is not None
        data = self.data.part(spec.share, self.seed)
        return run_curvature_pass(
            self.model,
            theta.to(self.model.device),
            data.batches,
            data.num_rows,
            spec,
            scale=self.scale.num_data / self.scale.num_terms * self.data.num_rows / data.num_rows,
            gradient=gradient,
            seed=self.seed,
            mesh=self.mesh,
            context=self.context,
        )

    def full_gradient(self, theta: Tensor, *, share: float = 1.0) -> Tensor | None:
        """Return the gradient of log p(D | theta) on all training rows, for ``theta`` [M, d]."""
        return gradient_of_all_rows(self, theta, share=share)

    def heldout(
        self, theta: Tensor, part: str, *, num_members: int | None = None, gradient: bool = False
    ) -> tuple[float, Tensor | None]:
        """Return the NLL of the mixture of draws ``theta`` [M, d], in nats per held-out term, and its gradient."""
        return self._heldout_rows().of_mixture(theta, part, num_members=num_members, gradient=gradient)

    def heldout_by_row(
        self, theta: Tensor, part: str, *, num_groups: int = 1, num_members: int | None = None
    ) -> list[RowScores]:
        """Return the score of every held-out row, for each group of draws ``theta`` [M, d]."""
        return self._heldout_rows().by_row(theta, part, num_groups=num_groups, num_members=num_members)

    def _heldout_rows(self) -> HeldOutRows:
        assert self.data is not None
        assert self.data.heldout is not None
        if self._heldout is None:
            self._heldout = HeldOutRows(
                self.model,
                self.data.heldout,
                self.data.num_heldout,
                mesh=self.mesh,
                context=self.context,
                hide=self.data.hide,
            )
        return self._heldout

    @torch.no_grad()
    def each_term(self, theta: Tensor, batches: list[Any], function: Callable[..., Any]) -> list[Any]:
        """Return ``function`` of the outputs and labels of some terms at a time, under ``theta`` [M, d]."""
        with self.model.showing(theta.to(self.model.device)), self.context():
            return [part for batch in batches for part in self.model.each_term(batch, function)]

    def close(self) -> None:
        """End the progress bar of held-out passes."""
        if self._heldout is not None:
            self._heldout.close()
            self._heldout = None

    # -- passes ----------------------------------------------------------------------------------------------------

    def passes(
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
        rows = num_rows_of(batch) // (1 if self.shared else count)
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

    def terms_of(self, batches: list[Any]) -> Tensor:
        """Return the likelihood terms that each chain finds in an update [M], over all processes that share it."""
        groups = 1 if self.shared else len(self.chains)
        per_row = [self.model.terms_per_row(batch) for batch in batches]
        terms = sum((rows.view(groups, -1).sum(1).cpu() for rows in per_row), torch.zeros(groups, dtype=torch.int64))
        if self.private is not None:
            terms = self.private.weight * terms.double()
        return self.mesh.sum_over_data(terms.to(self.model.device)).expand(len(self.chains))

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

    def _to_device(self, batch: Any) -> Any:
        device = self.model.device
        return with_tensors(batch, lambda tensor: tensor.to(device))
