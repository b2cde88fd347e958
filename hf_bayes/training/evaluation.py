"""Evaluation on the mixture: weighted by likelihood terms, streamed, never holding [M, B, T, V].

Every evaluation reports, weighted by likelihood terms: ``nll`` of the mixture (also as ``loss``), ``accuracy``,
``ece``, ``brier``, mean ``total``, ``aleatoric`` and ``epistemic`` uncertainty, and ``member_nll``, the mean NLL of
single members. Several labels have no ``accuracy``, ``ece`` and ``brier``, and uncertainties summed over the labels.
Regression reports ``nll``, ``member_nll``, ``mse`` of the predictive mean, and the means of its ``predictive_std`` and
``epistemic_std``. ``compute_metrics`` and ``predict`` get the mixture's log-probabilities (or means) as predictions.
Language models also report ``perplexity``, exp(nll) per token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hf_bayes.core.tensors import with_tensors
from hf_bayes.core.types import RowScores
from hf_bayes.diagnostics.comparison import row_scores
from hf_bayes.diagnostics.ensemble_limit import risk_asymptote
from hf_bayes.members.compat.transformers import CACHE
from hf_bayes.metrics import perplexity, summarise
from hf_bayes.models.predictives.built_in import Deviations
from hf_bayes.training.setup import Setup
from hf_bayes.training.trainer_host import TrainerHost
from hf_bayes.uncertainty.decomposition import Uncertainty

MAX_KEPT = 2**17
"""The largest number of log-likelihoods that are kept to measure C(S), the mean NLL of S members (``ensemble_limit``).

They are 16 thousand terms of 8 members, more than enough.
"""

Step = tuple[Tensor | None, Tensor | None, Tensor | None]
"""Loss, predictions and labels of a batch, as Trainer's ``prediction_step`` returns them."""


class EvaluationResult(NamedTuple):
    """The numbers of one evaluation.

    Attributes:
        metrics: name -> number, without a prefix; empty where no term was evaluated.
        rows: the NLL of every row.
        member_log_lik: [n, P, M] of the parts of terms spread evenly over the rows, ``MAX_KEPT`` numbers at most; None
            of a model without members.
    """

    metrics: dict[str, float]
    rows: RowScores | None = None
    member_log_lik: Tensor | None = None


_NO_PREDICTIONS = (CACHE, "aleatoric_std", *Uncertainty._fields, *Deviations._fields)
"""Fields of a model's output that are no logits."""


class Evaluator:
    """The statistics of an evaluation, collected batch by batch over all processes.

    Attributes:
        last: the last evaluation under each metric prefix.
        latest: the evaluation that ended last.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._batches: list[dict[str, Tensor]] | None = None
        self.last: dict[str, EvaluationResult] = {}
        self.latest = EvaluationResult({})

    def run(self, loop: Callable[[], Any], prefix: str) -> Any:
        """Run Trainer's evaluation loop, and add the metrics of the mixture to its output.

        Args:
            loop: Trainer's loop, which calls ``step`` for every batch.
            prefix: the prefix of the metrics' names, such as "eval", without the underscore.
        """
        batches: list[dict[str, Tensor]] = []
        self._batches = batches
        try:
            output = loop()
        finally:
            self._batches = None
        self.latest = _evaluation(batches, next_tokens=self._setup.model.term_kind == "token")
        self.last = {**self.last, prefix: self.latest}
        # Trainer's loss is no likelihood; a figure that compute_metrics returns is the user's own, whatever its name
        own = {f"{prefix}_{name}": value for name, value in self.latest.metrics.items()}
        output.metrics.update(own | {name: value for name, value in output.metrics.items() if name != f"{prefix}_loss"})
        return output

    def step(
        self,
        inputs: dict[str, Any],
        host: TrainerHost,
        *,
        keep_logits: bool,
        without_labels: Callable[..., Step],
        ignored: list[str] | None,
    ) -> Step:
        """Evaluate the batch of this process.

        If the members are spread over processes, every process evaluates the batches of all processes with its own
        members. The sums over members are added up, and each process keeps the result for its own batch.

        Args:
            without_labels: Trainer's own step, for a batch that has no labels and so no likelihood term.
            ignored: the fields of the model's output that this step leaves out, besides those that are no predictions.
        """
        mesh = self._setup.mesh
        batches = [inputs]
        if self._setup.model.member_group.size > 1:
            batches = mesh.exchange(with_tensors(inputs, lambda tensor: tensor.cpu()))
        own = partial(without_labels, ignore_keys=[*(ignored or ()), *_NO_PREDICTIONS])
        results = [self._predict(host.prepare(batch), keep_logits, host, own) for batch in batches]
        statistics, step = results[mesh.chain_rank if len(results) > 1 else 0]
        if statistics is not None and self._batches is not None:
            self._batches += self._of_all_processes(statistics, host.gradient_state)
        return step

    def _predict(
        self,
        inputs: dict[str, Any],
        keep_logits: bool,
        host: TrainerHost,
        without_labels: Callable[[Any], Step],
    ) -> tuple[tuple[dict[str, Tensor], Tensor] | None, Step]:
        """Return statistics of the terms with the number of terms in each row, and what ``step`` returns."""
        labels, model = inputs.get("labels"), self._setup.model
        if labels is None:
            return None, without_labels(inputs)
        with torch.no_grad(), host.evaluation_autocast():
            statistics, logits = model.evaluate_batch(inputs, keep_logits=keep_logits)
        step = statistics["nll"].float().mean(), logits, None if logits is None else labels
        return (statistics, model.terms_per_row(inputs)), step

    def _of_all_processes(self, mine: tuple[dict[str, Tensor], Tensor], state: Any) -> list[dict[str, Tensor]]:
        """Return the statistics of every process's batch, without the rows that accelerate repeats to fill a batch."""
        statistics, terms = mine
        on_cpu = {name: value.cpu() for name, value in statistics.items()}
        parts = self._setup.mesh.share((on_cpu, terms.cpu()))
        rows = state.remainder if len(parts) > 1 and state.end_of_dataloader and state.remainder > 0 else None
        kept = []
        for part, counts in parts:
            wanted = int(counts[:rows].sum())
            kept.append({name: value[:wanted] for name, value in part.items()} | {"terms_of_rows": counts[:rows]})
            rows = None if rows is None else max(0, rows - len(counts))
        return kept

    def ensemble_limit(
        self, evaluation: EvaluationResult, approximation: Any, *, mirrored: bool
    ) -> dict[str, Any] | None:
        """Return C(S) on the data of an evaluation, and its limit; None if the approximation is not draws.

        A part of the terms shows how C falls with S. All terms show where it stands at S = M. The error of the limit
        comes from independent chains, or from pairs of mirrored ones.
        """
        log_lik = evaluation.member_log_lik
        if log_lik is None or not approximation.num_stored:
            return None
        chains = [chain for part in self._setup.mesh.exchange(approximation.chains) for chain in part]
        found = risk_asymptote(log_lik, [chain // 2 for chain in chains] if mirrored else chains)
        if found is None:
            return None
        return {**dataclasses.asdict(found.at(evaluation.metrics["nll"])), "num_terms": len(log_lik)}


def _evaluation(batches: list[dict[str, Tensor]], *, next_tokens: bool) -> EvaluationResult:
    if not any(len(batch["nll"]) for batch in batches):  # no labels, or all of them are -100
        return EvaluationResult({})
    members = _pop_members(batches)
    terms = torch.cat([batch.pop("terms_of_rows") for batch in batches])
    columns = {name: np.concatenate([batch[name].float().cpu().numpy() for batch in batches]) for name in batches[0]}
    metrics = {name: float(value) for name, value in summarise(columns).items()}
    if next_tokens:
        metrics["perplexity"] = perplexity(metrics["nll"])
    nll = torch.cat([batch["nll"].cpu() for batch in batches])
    return EvaluationResult({**metrics, "loss": metrics["nll"]}, row_scores(nll.float(), terms), members)


def _pop_members(batches: list[dict[str, Tensor]]) -> Tensor | None:
    """Remove and return the matrices of the statistics. The remaining vectors give the metrics."""
    found = [batch.pop("member_log_lik").cpu() for batch in batches if "member_log_lik" in batch]
    if not found:
        return None
    terms = torch.cat(found)
    return terms[:: -(-terms.numel() // MAX_KEPT)]
