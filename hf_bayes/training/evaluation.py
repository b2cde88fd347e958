"""Evaluation on the mixture: weighted by likelihood terms, streamed, never holding [M, B, T, V]."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import DefaultFlowCallback, ProgressCallback
from transformers.trainer_callback import CallbackHandler

from hf_bayes.diagnostics.comparison import RowScores, row_scores
from hf_bayes.distributed.member_sums import SpreadMembers
from hf_bayes.distributed.mesh import ChainMesh
from hf_bayes.metrics import summarise
from hf_bayes.models.base import BayesianModel
from hf_bayes.models.predictives import Deviations
from hf_bayes.training.mixin import AnyTrainer
from hf_bayes.uncertainty.decomposition import Uncertainty

MAX_KEPT = 2**17
"""Numbers: 16 thousand terms of 8 members, from which C(S) is known better than from so many draws."""


class EvaluationMixin(AnyTrainer):
    """Trainer's evaluation with the posterior's metrics.

    Every evaluation reports, weighted by likelihood terms: ``nll`` of the mixture (also as ``loss``), ``accuracy``,
    ``ece``, ``brier``, mean ``total``, ``aleatoric`` and ``epistemic`` uncertainty, and ``member_nll``, the mean NLL of
    single members. Regression reports ``nll``, ``member_nll``, ``mse`` of the predictive mean, and the means of its
    ``predictive_std`` and ``epistemic_std``. ``compute_metrics`` and ``predict`` get the mixture's log-probabilities
    (or means) as predictions.
    """

    bayesian: BayesianModel
    mesh: ChainMesh
    accelerator: Any
    callback_handler: CallbackHandler
    compute_metrics: Any
    _statistics: list[dict[str, Tensor]] | None = None
    """Of the batches so far, while an evaluation goes through them."""
    _member_log_lik: Tensor | None = None
    """[n, M] of terms spread evenly over the last evaluation, as many as hold ``MAX_KEPT`` numbers."""
    _mixture_nll: float
    """Of all its terms, nats per term."""
    _row_scores: Mapping[str, RowScores] = MappingProxyType({})
    """The NLL of every row, of the last evaluation under each metric prefix; each evaluation makes a new mapping."""

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> Any:
        batches: list[dict[str, Tensor]] = []
        self._statistics, self._member_log_lik = batches, None
        try:
            output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        finally:
            self._statistics = None
        if any(len(batch["nll"]) for batch in batches):  # else nothing can be said: no labels, or all -100
            self._member_log_lik = _pop_members(batches)
            terms = torch.cat([batch.pop("terms_of_rows") for batch in batches])
            metrics = summarise(
                {name: np.concatenate([batch[name].float().cpu().numpy() for batch in batches]) for name in batches[0]}
            )
            nll = torch.cat([batch["nll"].cpu() for batch in batches])
            self._row_scores = {**self._row_scores, metric_key_prefix: row_scores(nll.float(), terms)}
            metrics["loss"] = self._mixture_nll = metrics["nll"]
            output.metrics.update({f"{metric_key_prefix}_{name}": float(value) for name, value in metrics.items()})
        return output

    def _measure(self, prefix: str) -> dict[str, float]:
        """What ``evaluate`` finds on the trainer's own eval_dataset, told to nobody.

        A save asks for these figures, and no run: a callback would take them for an evaluation of the run and stop it,
        log them after its end, or miss the name that it reads, and then nothing would be saved.
        """
        several = isinstance(self.eval_dataset, dict)
        names = list(self.eval_dataset) if several else [None]
        kept = self.callback_handler, self.compute_metrics
        # the one that shows how far it is; Trainer's handler warns if the other is not there
        silent = [DefaultFlowCallback(), *([] if self.args.disable_tqdm else [ProgressCallback()])]
        self.callback_handler = CallbackHandler(
            silent, self.model, self.processing_class, self.optimizer, self.lr_scheduler
        )
        self.compute_metrics = None
        metrics: dict[str, float] = {}
        try:
            for name in names:
                output = self.evaluation_loop(
                    self.get_eval_dataloader(name),
                    description="Evaluation",
                    prediction_loss_only=True,
                    metric_key_prefix=prefix if name is None else f"{prefix}_{name}",
                )
                metrics |= output.metrics
                self.callback_handler.on_predict(self.args, self.state, self.control, output.metrics)  # ends the bar
        finally:
            self.callback_handler, self.compute_metrics = kept
        return metrics

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Processes hold other members: each batch goes to all of them, and its sums come back."""
        results = [
            self._predict(model, batch, prediction_loss_only, ignore_keys) for batch in self._batches_of_all(inputs)
        ]
        statistics, *mine = results[self.mesh.chain_rank if len(results) > 1 else 0]
        if statistics is not None and self._statistics is not None:
            self._statistics += self._of_all_processes(statistics)
        loss, logits, labels = mine
        return loss, logits, labels

    def _batches_of_all(self, inputs: dict[str, Any]) -> list[dict[str, Any]]:
        if isinstance(self.bayesian.spread, SpreadMembers):
            on_cpu = {k: v.cpu() if isinstance(v, Tensor) else v for k, v in inputs.items()}
            return self.mesh.exchange(on_cpu)
        return [inputs]

    def _predict(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None
    ) -> tuple[tuple[dict[str, Tensor], Tensor] | None, Tensor | None, Tensor | None, Tensor | None]:
        """Statistics of the terms and how many each row has, then what ``prediction_step`` returns."""
        inputs = self._prepare_inputs(inputs)
        labels = inputs.get("labels")
        if labels is None:
            ignore_keys = [*(ignore_keys or []), "past_key_values", *Uncertainty._fields, *Deviations._fields]
            return None, *super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        with torch.no_grad(), self.accelerator.autocast():
            statistics, logits = self.bayesian.evaluate_batch(inputs, keep_logits=not prediction_loss_only)
        loss = statistics["nll"].float().mean()
        return (statistics, self.bayesian.terms_per_row(inputs)), loss, logits, None if logits is None else labels

    def _of_all_processes(self, mine: tuple[dict[str, Tensor], Tensor]) -> list[dict[str, Tensor]]:
        """The statistics of every process's batch, without the rows that accelerate repeats to fill the last ones."""
        statistics, terms = mine
        on_cpu = {name: value.cpu() for name, value in statistics.items()}
        parts = self.mesh.share((on_cpu, terms.cpu()))
        state = self.accelerator.gradient_state
        rows = state.remainder if len(parts) > 1 and state.end_of_dataloader and state.remainder > 0 else None
        kept = []
        for part, counts in parts:
            wanted = int(counts[:rows].sum())
            kept.append({name: value[:wanted] for name, value in part.items()} | {"terms_of_rows": counts[:rows]})
            rows = None if rows is None else max(0, rows - len(counts))
        return kept


def _pop_members(batches: list[dict[str, Tensor]]) -> Tensor | None:
    """Take the matrices out of the statistics: what is left are vectors, which metrics are made of."""
    found = [batch.pop("member_log_lik").cpu() for batch in batches if "member_log_lik" in batch]
    if not found:
        return None
    terms = torch.cat(found)
    return terms[:: -(-terms.numel() // MAX_KEPT)]
