"""The log-likelihood of a Bayesian model on rows of data, as the objective of a run.

This module holds the one place in the project that differentiates a micro-batch's log-likelihood
(``ModelObjective.passes``). Training, kernels, the MAP reference, gradient noise and time estimates all go through it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_bayes.chains.objective import FailureWords
from hf_bayes.core.rng import seed_of
from hf_bayes.core.tensors import with_tensors
from hf_bayes.core.types import Evaluation, HeldOut, Info
from hf_bayes.distributed.mesh import ChainMesh
from hf_bayes.members.inputs import num_rows_of
from hf_bayes.methods.laplace.supported import CurvatureSpec
from hf_bayes.models.base import BayesianModel
from hf_bayes.objectives.curvature_pass import CurvaturePassResult, run_curvature_pass
from hf_bayes.objectives.data_access import DataAccess
from hf_bayes.objectives.data_scale import DataScale
from hf_bayes.objectives.gradient_variance import BetweenBatches, between_halves
from hf_bayes.objectives.heldout import HeldOutRows
from hf_bayes.objectives.private_rows import Stratum

SMALL_PASS_ROWS = 512
"""Rows (members x sequences x positions) up to which members are folded in training."""


class Pass(NamedTuple):
    """One pass of some members over a micro-batch.

    Attributes:
        members: which chains.
        loss: [m] minus the sum of their log-likelihoods.
        grad: [m, d] its gradient; None if it was not asked for.
    """

    members: slice
    loss: Tensor
    grad: Tensor | None


class ModelObjective:
    """The log-likelihood of the chains of this process; the only way from theta to numbers of the model.

    Args:
        model: attached.
        scale: the size of the data and of an update.
        mesh: the processes; None is this one alone.
        chains: the chains of this process; None: those of the mesh.
        dropout: dropout is on, as in training.
        shared: all chains see the same rows. Otherwise a batch holds rows of chain after chain.
        in_float64: log-likelihoods stay in float64, for kernels, which compare energies.
        returns_batches: an evaluation has ``batch_log_lik``.
        measures_noise: an evaluation with a gradient has ``grad_variance``, from its micro-batches.
        seed: of dropout masks, which are a function of seed, chain, step and micro-batch.
        members_per_pass: how many chains train together; None chooses by the length of a pass.
        private: the place of this process among processes that keep their rows; None where rows are common.
        context: entered around forwards, for autocast.
        prepare: moves a batch to the device.
        data: rows by number; None where no method needs them.
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
        private: Stratum | None = None,
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

    # -- passes over the data that a method may request after its last update ---------------------------------------

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

    def heldout(self, theta: Tensor, what: HeldOut, *, gradient: bool = True) -> tuple[float, Tensor | None]:
        """Return the mixture's nats per held-out term for the draws ``theta`` [M, d], and their gradient."""
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
        return self._heldout(theta, what, gradient=gradient)

    def data_pass(self, theta: Tensor, what: Any, *, gradient: bool) -> Any:
        """Pass over the data once more, for a method that needs it (``core.types.DataPass``)."""
        return (self.heldout if isinstance(what, HeldOut) else self.curvature)(theta, what, gradient=gradient)

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
    ) -> Iterator[Pass]:
        """Yield log-likelihood and gradient of a micro-batch, a few members at a time.

        Args:
            theta: [M, d].
            batch: prepared.
            step, micro: numbers of the update and of the micro-batch, for dropout masks.
            chunks: which members go together; None: ``member_chunks`` of the batch.
        """
        with self._trunk_once(batch, shared=True):
            for members in chunks or self.member_chunks(batch):
                self._seed_dropout(members, step, micro)
                rows = self.rows_of(batch, members)
                with self._trunk_once(rows, shared=False), torch.set_grad_enabled(gradient):
                    leaf = theta[members].detach().requires_grad_(gradient)
                    with self.context():
                        loss = self.model(**rows, theta=leaf, folded=not self.shared).loss
                    if gradient:
                        loss.sum().backward()
                    yield Pass(members, loss.detach(), leaf.grad)

    def member_chunks(self, batch: dict[str, Any]) -> list[slice]:
        """Return which members train together: as many as keep passes small.

        Arithmetic bounds long passes: folding gains little there and costs the activations of every member. Overhead
        bounds short passes, and folding divides it. A shared trunk runs once for all passes, but not with dropout: then
        all members go in one pass.
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
        """Return the context of passes over a micro-batch that is ``shared``, or over rows of a chain's own."""
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


class ModelOfUpdate:
    """A model's log-likelihood on the micro-batches of one update, callable as ``core.types.Evaluate``.

    Attributes:
        terms: [M] likelihood terms of the update.
    """

    def __init__(self, objective: ModelObjective, batches: list[Any], step: int, terms: Tensor) -> None:
        self._objective, self._step, self.terms = objective, step, terms
        mesh = objective.mesh
        if objective.private is None:  # processes that share chains take turns
            self._count = len(batches) * mesh.data_size
            self._mine = dict(zip(range(mesh.data_rank, self._count, mesh.data_size), batches, strict=True))
        else:  # each process has a part in every batch
            self._count, self._mine = len(batches), dict(enumerate(batches))

    def info(self) -> Info:
        """Return no diagnostics."""
        return {}

    def __call__(
        self, theta: Tensor, *, gradient: bool = True, batches: slice | None = None, split_rows: bool = False
    ) -> Evaluation:
        """Return the log-likelihood and its gradient at ``theta`` [M, d], on the scale of all data."""
        objective, sizes = self._objective, self._objective.model.layout.sizes
        chosen = range(self._count)[slice(None) if batches is None else batches]
        log_liks = torch.zeros(len(theta), self._count, dtype=torch.float64, device=theta.device)
        grad = torch.zeros_like(theta) if gradient else None
        noise = BetweenBatches(theta, sizes) if objective.measures_noise and self._count > 1 and gradient else None
        for micro, place in enumerate(place for place in chosen if place in self._mine):
            batch = objective.prepare(self._mine[place])
            for members, loss, part in objective.passes(theta, batch, gradient=gradient, step=self._step, micro=micro):
                log_liks[members, place] -= loss
                if grad is not None and part is not None:
                    grad[members] -= part
                    if noise is not None:
                        noise.add(members, part)
        variance = None
        if split_rows and grad is not None and self._count == 1:
            variance = self._variance_between_halves(theta, -grad)
        log_liks = log_liks[:, chosen.start : chosen.stop].contiguous()
        if objective.private is not None:
            log_liks = objective.private.contribution(log_liks)
            grad = None if grad is None else objective.private.weight * grad
        return self._on_all_data(log_liks, grad, noise, variance, len(chosen))

    def _variance_between_halves(self, theta: Tensor, grad: Tensor) -> Tensor | None:
        """Return the variance of ``grad`` [M, d], of minus the log-likelihood on the update's single micro-batch."""
        objective, batch = self._objective, self._objective.prepare(self._mine[0])
        chunks = objective.member_chunks(batch)  # of the whole: more members of half the rows would need more memory
        options: dict[str, Any] = {"gradient": True, "step": self._step, "chunks": chunks}
        return between_halves(
            objective.model,
            batch,
            grad,
            lambda half, number: objective.passes(theta, half, micro=number, **options),
            num_groups=1 if objective.shared else len(objective.chains),
        )

    def _on_all_data(
        self,
        log_liks: Tensor,
        grad: Tensor | None,
        noise: BetweenBatches | None,
        variance: Tensor | None,
        num_chosen: int,
    ) -> Evaluation:
        """Sum over the processes that share these chains, and scale the sums to all data."""
        objective, share, terms = self._objective, num_chosen / self._count, self.terms.double().clamp_min(1)
        # the only numbers that processes with other rows of these chains exchange: K a chain, and the gradient
        log_liks = objective.mesh.sum_over_data(log_liks)
        scale = torch.as_tensor(objective.scale.factor(terms) / share, dtype=torch.float64, device=log_liks.device)
        scale = scale.view(-1, 1)
        if grad is not None:
            objective.mesh.sum_over_data(grad)
            if noise is not None:
                variance = noise.of_sum(grad, objective.mesh.sum_over_data)
            grad *= scale.to(grad.dtype)
        columns = num_chosen * scale * log_liks if objective.returns_batches else None
        log_lik = scale[:, 0] * log_liks.sum(1)
        loss = -log_liks.sum(1) / (share * terms)
        if variance is not None:
            variance = scale.to(variance) ** 2 * variance
        # a kernel accepts by differences of a nat, and float32 counts energies near 1e7 in whole ones
        log_lik = log_lik if objective.in_float64 or grad is None else log_lik.to(grad.dtype)
        return Evaluation(log_lik, grad, variance, columns, loss)
