"""Evaluation on the mixture: weighted by likelihood terms, streamed, never holding [M, B, T, V]."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from hf_bayes.metrics import summarise
from hf_bayes.model import BayesianModel
from hf_bayes.uncertainty import Uncertainty

if TYPE_CHECKING:  # a mixin: put before any Trainer, it finds that one's methods
    from transformers import Trainer as _Trainer
else:
    _Trainer = object


class EvaluationMixin(_Trainer):
    """Trainer's evaluation with the posterior's metrics.

    Every evaluation reports, weighted by likelihood terms: ``nll`` of the mixture (also as ``loss``), ``accuracy``,
    ``ece``, ``brier``, mean ``total``, ``aleatoric`` and ``epistemic`` uncertainty, and ``member_nll``, the mean NLL of
    single members. ``compute_metrics`` and ``predict`` get the mixture's log-probabilities as predictions.
    """

    bayesian: BayesianModel
    accelerator: Any
    _statistics: list[dict[str, Tensor]]

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> Any:
        self._statistics = []
        output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        if self._statistics:
            metrics = summarise(
                {
                    name: np.concatenate([batch[name].float().cpu().numpy() for batch in self._statistics])
                    for name in self._statistics[0]
                }
            )
            metrics["loss"] = metrics["nll"]
            output.metrics.update({f"{metric_key_prefix}_{name}": float(value) for name, value in metrics.items()})
        self._statistics = []
        return output

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        inputs = self._prepare_inputs(inputs)
        labels = inputs.get("labels")
        if labels is None:
            ignore_keys = [*(ignore_keys or []), "past_key_values", *Uncertainty._fields]
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        with torch.no_grad(), self.accelerator.autocast():
            statistics, logits = self.bayesian.evaluate_batch(inputs, keep_logits=not prediction_loss_only)
        self._statistics.append(statistics)
        return statistics["nll"].float().mean(), logits, None if logits is None else labels
