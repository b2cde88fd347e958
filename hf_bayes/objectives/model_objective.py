"""The log-likelihood of a Bayesian model on rows of data, as the objective of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hf_bayes.chains.objective import FailureWords
from hf_bayes.core.types import Evaluation, RowScores
from hf_bayes.methods.laplace.supported import CurvatureSpec
from hf_bayes.models.base import BayesianModel
from hf_bayes.objectives.all_rows import gradient_of_all_rows
from hf_bayes.objectives.curvature_pass import CurvaturePassResult, run_curvature_pass
from hf_bayes.objectives.data_access import DataAccess
from hf_bayes.objectives.data_scale import DataScale
from hf_bayes.objectives.heldout import HeldOutRows
from hf_bayes.objectives.model_of_update import ModelOfUpdate
from hf_bayes.objectives.passes import MemberPasses
from hf_bayes.objectives.private_rows import PrivateRows


class ModelObjective:
    """The log-likelihood of a model for the chains of this process, its gradient, and passes over all data.

    Args:
        passes: the passes over micro-batches, with the model, the mesh and the chains of this process.
        scale: the size of the data and of an update.
        data: rows by number; None if no method needs them.
        private: the rows of this process, if processes keep their rows to themselves; otherwise None.
        in_float64: log-likelihoods stay in float64, because kernels compare energies.
        returns_batches: an evaluation has ``batch_log_lik``.
        measures_noise: an evaluation with a gradient has ``grad_variance``, if it has two micro-batches or more.
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
        passes: MemberPasses,
        scale: DataScale,
        *,
        data: DataAccess | None = None,
        private: PrivateRows | None = None,
        in_float64: bool = False,
        returns_batches: bool = False,
        measures_noise: bool = False,
    ) -> None:
        self.passes, self.scale, self.data, self.private = passes, scale, data, private
        self.in_float64, self.returns_batches, self.measures_noise = in_float64, returns_batches, measures_noise
        self._heldout: HeldOutRows | None = None
        settings = self.model.likelihood.config
        if settings is not None and settings.advice:  # a user's likelihood adds its advice
            self.words = self.words._replace(cause=f". {settings.advice}")

    @property
    def model(self) -> BayesianModel:
        """The attached model."""
        return self.passes.model

    # -- what a run calls ------------------------------------------------------------------------------------------

    def for_update(self, batches: list[Any], *, step: int, inside: Tensor | None = None) -> ModelOfUpdate:
        """Return the log-likelihood on the micro-batches of one update, see ``chains.objective.Objective``."""
        self.model.train(self.passes.dropout)
        return ModelOfUpdate(
            self.passes,
            batches,
            step,
            self.terms_of(batches),
            self.scale,
            self.private,
            in_float64=self.in_float64,
            returns_batches=self.returns_batches,
            measures_noise=self.measures_noise,
        )

    def evaluate(self, theta: Tensor, batches: list[Any], *, gradient: bool = True) -> Evaluation:
        """Return log-likelihood and gradient at ``theta`` [M, d], estimated from the batches of one update."""
        return self.for_update(batches, step=0)(theta, gradient=gradient)

    def place_of(self, column: int) -> str:
        """Return ", " and the name of the parameter that holds a column of theta."""
        return f", {self.model.layout.name_at(column)}"

    def terms_of(self, batches: list[Any]) -> Tensor:
        """Return the likelihood terms that each chain finds in an update [M], over all processes that share it."""
        groups, per_row = self.passes.num_groups, [self.model.terms_per_row(batch) for batch in batches]
        terms = sum((rows.view(groups, -1).sum(1).cpu() for rows in per_row), torch.zeros(groups, dtype=torch.int64))
        if self.private is not None:
            terms = self.private.weight * terms.double()
        return self.passes.mesh.sum_over_data(terms.to(self.model.device)).expand(len(self.passes.chains))

    # -- more passes over the data, for a method that needs them (``core.types.DataPasses``) ------------------------

    def curvature(self, theta: Tensor, spec: CurvatureSpec, *, gradient: bool = True) -> CurvaturePassResult:
        """Return log-likelihood, gradient and curvature of all training data at ``theta`` [d]."""
        assert self.data is not None
        assert self.scale.num_terms is not None
        passes, data = self.passes, self.data.part(spec.share, self.passes.seed)
        return run_curvature_pass(
            self.model,
            theta.to(self.model.device),
            data.batches,
            data.num_rows,
            spec,
            scale=self.scale.num_data / self.scale.num_terms * self.data.num_rows / data.num_rows,
            gradient=gradient,
            seed=passes.seed,
            mesh=passes.mesh,
            context=passes.context,
        )

    def full_gradient(self, theta: Tensor, *, share: float = 1.0, without_dropout: bool = False) -> Tensor | None:
        """Return the gradient of log p(D | theta) on all training rows, for ``theta`` [M, d].

        The result is None without rows by number, if rows are private to processes (they are not weighted here), and
        where ``gradient_of_all_rows`` returns None.
        """
        if self.data is None or self.private is not None:
            return None
        passes = replace(self.passes, dropout=False) if without_dropout else self.passes
        return gradient_of_all_rows(passes, theta, self.data, self.scale, share=share)

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
                mesh=self.passes.mesh,
                context=self.passes.context,
                hide=self.data.hide,
            )
        return self._heldout

    @torch.no_grad()
    def each_term(self, theta: Tensor, batches: list[Any], function: Callable[..., Any]) -> list[Any]:
        """Return ``function`` of the outputs and labels of some terms at a time, under ``theta`` [M, d]."""
        with self.model.showing(theta.to(self.model.device)), self.passes.context():
            return [part for batch in batches for part in self.model.each_term(batch, function)]

    def close(self) -> None:
        """End the progress bar of held-out passes."""
        if self._heldout is not None:
            self._heldout.close()
            self._heldout = None
