"""Evaluation on the mixture: weighted by likelihood terms, streamed, never holding [M, B, T, V]."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hf_bayes.metrics import summarise
from hf_bayes.model import BayesianModel


class EvaluationMixin:
    """Trainer's evaluation with the posterior's metrics.

    Every evaluation reports, weighted by likelihood terms: ``nll`` of the mixture (also as ``loss``), ``accuracy``,
    ``ece``, ``brier``, mean ``total``, ``aleatoric`` and ``epistemic`` uncertainty, and ``member_nll``, the mean NLL of
    single members. ``compute_metrics`` and ``predict`` get the mixture's log-probabilities as predictions.
    """

    bayesian: BayesianModel
    compute_metrics: Any
    accelerator: Any
    _statistics: list[dict[str, Tensor]]
    _wants_logits = False

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> Any:
        self._statistics = []
        self._wants_logits = self.compute_metrics is not None or metric_key_prefix == "test"
        output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)  # type: ignore[misc]
        if self._statistics:
            metrics = summarise({
                name: np.concatenate([batch[name].float().cpu().numpy() for batch in self._statistics])
                for name in self._statistics[0]
            })
            metrics["loss"] = metrics["nll"]
            output.metrics.update({f"{metric_key_prefix}_{name}": float(value) for name, value in metrics.items()})
        self._statistics = []
        return output

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        inputs = self._prepare_inputs(inputs)  # type: ignore[attr-defined]
        labels = inputs.get("labels")
        if labels is None:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)  # type: ignore[misc]
        with torch.no_grad(), self.accelerator.autocast():
            statistics, logits = self.bayesian.evaluate_batch(inputs, keep_logits=self._wants_logits)
        self._statistics.append(statistics)
        return statistics["nll"].float().mean(), logits, None if logits is None else labels
