"""M sequence classifiers or regressors as one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import SequenceClassifierOutput

from hf_bayes.likelihood import Bernoulli, Categorical, Likelihood, Normal, widened
from hf_bayes.model import BayesianModel, MemberLogLik, term_statistics
from hf_bayes.subspace import Layout
from hf_bayes.uncertainty import Prediction, Uncertainty


@dataclass
class BayesianClassifierOutput(SequenceClassifierOutput):
    """``logits`` [B, C] are the log of the mixture; uncertainties [B] in nats (for regression: the members' mean, no
    uncertainties)."""

    total: Tensor | None = None
    aleatoric: Tensor | None = None
    epistemic: Tensor | None = None


class BayesianModelForSequenceClassification(BayesianModel):
    """M classifiers (or regressors) as one; also any model whose ``logits`` [B, C] answer ``labels`` [B]."""

    task = "sequence_classification"

    def __init__(
        self, model: nn.Module, layout: Layout, theta: Tensor, *, trunk: bool = True, noise_std: float | None = None
    ) -> None:
        super().__init__(model, layout, theta, trunk=trunk)
        try:
            self.likelihood = _classifier_likelihood(self.config, noise_std)
        except ValueError:
            self.detach()
            raise

    def log_lik(self, theta: Tensor, inputs: dict[str, Any], *, folded: bool) -> MemberLogLik:
        inputs = dict(inputs)
        labels, members = inputs.pop("labels"), len(theta)
        with self.members.bind(theta):
            logits = self._logits(inputs, members, folded=folded)
            self.members.check_all_read()
        labels = labels.unflatten(0, (members, -1)) if folded else labels.expand(members, *labels.shape)
        terms = self.likelihood.is_term(labels.flatten(0, 1)).view(members, -1).sum(1)
        return MemberLogLik(-self.likelihood.log_prob(logits, labels).sum(1), terms)

    def forward(
        self, labels: Tensor | None = None, *, theta: Tensor | None = None, folded: bool = False, **inputs: Any
    ) -> BayesianClassifierOutput | MemberLogLik:
        """The mixture of all members; with ``theta``, what training needs of them instead (``log_lik``).

        Args:
            labels: [B] classes (or [B, C] for multi-label and regression); the loss is that of the mixture.
            theta: [m, d] members to differentiate.
            folded: with ``theta``: the batch holds other rows for each member.
            inputs: what the wrapped model takes.
        """
        for name in ("return_dict", "num_items_in_batch", "output_hidden_states", "output_attentions"):
            inputs.pop(name, None)
        if theta is not None:
            return self.log_lik(theta, {**inputs, "labels": labels}, folded=folded)
        logits = self._member_logits(inputs)
        loss = None
        if labels is not None:
            terms = self.likelihood.is_term(labels)
            loss = self._mixture_nll(logits, labels)[terms].sum() / terms.sum().clamp_min(1)
        if not isinstance(self.likelihood, Categorical):
            return BayesianClassifierOutput(loss=loss, logits=self._mean(logits))
        prediction = self.spread.predict(logits)
        return BayesianClassifierOutput(loss=loss, logits=prediction.log_probs, **prediction.uncertainty._asdict())

    def evaluate_batch(
        self, inputs: dict[str, Any], *, keep_logits: bool = False
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        inputs = dict(inputs)
        labels = inputs.pop("labels")
        logits = self._member_logits(inputs)
        if isinstance(self.likelihood, Categorical):
            prediction, terms = self.spread.predict(logits), self.likelihood.is_term(labels)
            mixture = prediction.log_probs
            kept = Prediction(mixture[terms], Uncertainty(*(part[terms] for part in prediction.uncertainty)))
            statistics = term_statistics(kept, logits[:, terms], labels[terms], self.spread)
        else:
            mixture = self._mean(logits)
            per_member = self.likelihood.log_prob(logits, labels.expand(len(logits), *labels.shape))
            statistics = {"nll": -self.spread.log_mean_exp(per_member), "member_nll": -self.spread.mean(per_member)}
        return statistics, mixture if keep_logits else None

    @staticmethod
    def settings_of(head: dict[str, Any]) -> dict[str, Any]:
        return {"noise_std": head.get("noise_std")}

    def _member_logits(self, inputs: dict[str, Any]) -> Tensor:
        """[M, B, C]"""
        pieces = []
        with self.members.trunk.once():
            for theta in self._passes(inputs):
                with self.members.bind(theta):
                    pieces.append(self._logits(inputs, len(theta)))
        return torch.cat(pieces)

    def _logits(self, inputs: dict[str, Any], num_members: int, *, folded: bool = False) -> Tensor:
        """[m, B, C] of the members now bound."""
        output = self.members.forward(inputs, folded=folded)
        if getattr(output, "logits", None) is None:
            raise ValueError(f"{type(self.core).__name__} answers no logits: give a model with a head, such as "
                             "AutoModelForSequenceClassification loads")  # fmt: skip
        return output.logits.unflatten(0, (num_members, -1))

    def _mean(self, logits: Tensor) -> Tensor:
        """[M, B, C] -> [B, C]: the members' mean, and of labels of their own the logits of their mean probabilities."""
        logits = widened(logits)
        if not isinstance(self.likelihood, Bernoulli):
            return self.spread.mean(logits)
        # as logarithms, since a probability rounds to 1
        yes, no = (self.spread.log_mean_exp(nn.functional.logsigmoid(sign * logits)) for sign in (1, -1))
        return yes - no

    def _mixture_nll(self, logits: Tensor, labels: Tensor) -> Tensor:
        """[B]: -log mean_m p_m(label)."""
        per_member = self.likelihood.log_prob(logits, labels.expand(len(logits), *labels.shape))
        return -self.spread.log_mean_exp(per_member)


def _classifier_likelihood(config: Any, noise_std: float | None) -> Likelihood:
    problem = getattr(config, "problem_type", None) or ("regression" if config.num_labels == 1 else None)
    if problem == "regression":
        if noise_std is None or not noise_std > 0:
            raise ValueError(
                f"a regression head needs noise_std > 0, the standard deviation of its labels' noise, got {noise_std}: "
                "set BayesianTrainingArguments(noise_std=...)"
            )
        return Normal(noise_std)
    return Bernoulli() if problem == "multi_label_classification" else Categorical()
