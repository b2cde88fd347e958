"""What a method makes of its chains after the last update, and the data that it may look at for that."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader

from hf_bayes.core.config import MethodConfig
from hf_bayes.core.types import Approximation, HeldOut, Rule
from hf_bayes.distributed.mesh import ChainMesh
from hf_bayes.distributions.approximations import Draws, joined
from hf_bayes.distributions.covariance import moved
from hf_bayes.models.base import BayesianModel
from hf_bayes.objectives.batches import count_terms
from hf_bayes.objectives.curvature_pass import survey
from hf_bayes.objectives.heldout import HeldOutRows
from hf_bayes.training.mixin import AnyTrainer
from hf_bayes.training.refusals import require_heldout
from hf_bayes.uncertainty.likelihoods import Likelihood, Normal


class RevisionMixin(AnyTrainer):
    """The trainer's answers to a method that revises its chains (``types.Rule.revise``)."""

    bayesian: BayesianModel
    likelihood: Likelihood
    method: MethodConfig
    mesh: ChainMesh
    num_terms: int | None
    _rows_by_number: Callable[[Sequence[int]], Iterator[dict[str, Any]]]
    _without_unused: Callable[..., tuple[Any, Callable]]
    _heldout: HeldOutRows | None = None

    def _approximate(self, draws: Tensor) -> tuple[Approximation, dict[str, Any]]:
        """What the method makes of its chains, and its report. One that stores no members is whole in every process."""
        chains, method = self._chains_optimizer, self._chains_optimizer.method
        if isinstance(method, Rule) and method.revise is not None:
            parts: list[Any]
            if self.method.requirements.all_chains_in_one_pass:
                parts = [method.revise(chains.state_of_chains, self.mesh.gather_chains(draws), self._look)]
            else:  # for the chains of this process; processes that share chains share the rows and find the same
                parts = self.mesh.exchange(method.revise(chains.state_of_chains, draws, self._look))
            chains.spread = None
            if self._heldout is not None:
                self._heldout.close()
                self._heldout = None
            if parts[0].noise_std is not None:
                self.bayesian.likelihood = Normal(parts[0].noise_std)
            names = parts[0].report
            return joined([p.approximation for p in parts]), {n: [v for p in parts for v in p.report[n]] for n in names}
        approximation = method.finish(chains.state_of_chains, draws)
        if isinstance(approximation, Draws):
            return dataclasses.replace(approximation, chain=approximation.chain + self.chains.start), {}
        everywhere = self.mesh.gather_chains
        state = chains.state_of_chains
        state = type(state)(**{name: everywhere(value) for name, value in state._asdict().items()})
        chains.spread = None
        return moved(method.finish(state, draws), "cpu"), {}  # as draws are, whatever device the chains are on

    def _look(self, theta: Tensor, what: Any, *, gradient: bool) -> Any:
        """One pass over the training data or over held-out rows, for a method that asks for it (``types.Look``)."""
        if isinstance(what, HeldOut):
            rows = len(self._heldout_rows)
            hide = self.args.disable_tqdm or not self.is_world_process_zero()
            options: dict[str, Any] = {"mesh": self.mesh, "context": self.compute_loss_context_manager, "hide": hide}
            self._heldout = self._heldout or HeldOutRows(self.bayesian, self._heldout_by_number, rows, **options)
            return self._heldout(theta, what, gradient=gradient)
        assert self.num_terms is not None, "streams are refused for such a method"
        return survey(
            self.bayesian,
            theta.to(self.args.device),
            self._rows_by_number,
            len(self.train_dataset),
            what,
            scale=self.num_data / self.num_terms,
            gradient=gradient,
            seed=self.args.seed,
            mesh=self.mesh,
            context=self.compute_loss_context_manager,
        )

    @property
    def _heldout_rows(self) -> Any:
        """What a method fits by that asks for held-out rows: the eval_dataset, of several the one named "heldout"."""
        return self.eval_dataset["heldout"] if isinstance(self.eval_dataset, dict) else self.eval_dataset

    def _prepare_heldout(self) -> None:
        """Refuse held-out rows that cannot be counted or have no labels, before anything runs."""
        require_heldout(self.eval_dataset, self.method)
        dataset, collate = self._without_unused(self._heldout_rows, "evaluation")
        outputs = self.bayesian.num_outputs
        options: dict[str, Any] = {"shift": self.bayesian.shifts_labels, "num_outputs": outputs, "progress": False}
        options |= {"halves": self.method.requirements.heldout == "halves", "check": self.bayesian.check_inputs}
        count_terms(dataset, collate, self.likelihood, name="eval_dataset", **options)

    def _heldout_by_number(self, rows: Sequence[int]) -> Iterator[dict[str, Any]]:
        """As ``_rows_by_number``, of the held-out rows."""
        dataset, collate = self._without_unused(self._heldout_rows, "evaluation")
        size = self.args.per_device_eval_batch_size
        for batch in DataLoader(dataset, batch_size=size, sampler=rows, collate_fn=collate):
            yield self._prepare_inputs(batch)
