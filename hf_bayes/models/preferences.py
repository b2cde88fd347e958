"""Causal language models under the likelihood of DPO: a row is a pair of answers, and its likelihood that of a choice.

The model is an ordinary Bayesian language model in everything but training and evaluation: it generates, and its
posterior is loaded as ``BayesianModelForCausalLM``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hf_bayes.core.compat import num_writes
from hf_bayes.core.layout import Layout
from hf_bayes.core.tensors import tensors_in
from hf_bayes.members.evaluation_mode import evaluating
from hf_bayes.members.inputs import without_labels
from hf_bayes.models.causal_lm import BayesianModelForCausalLM
from hf_bayes.models.prediction_mode import predicts
from hf_bayes.models.predictives import custom as custom_predictives
from hf_bayes.models.predictors import MemberLogLik, Reader, Readings
from hf_bayes.models.text_pairs import GroupCheck, flattened, holds_groups
from hf_bayes.uncertainty.custom.direct_preferences import DirectPreferences
from hf_bayes.uncertainty.likelihoods import IGNORE, next_tokens

REFERENCE = "ref_logps"
"""The input that holds log p_ref of both answers [B, 2], where it was computed beforehand."""
_NOT_THE_MODELS = (REFERENCE, "completion_mask", "labels")


class _Batch:
    """The tensors of a batch, and how often each was written in place until now: loaders refill their buffers.

    PyTorch does not count the writes into tensors of ``torch.inference_mode``: a batch that has one equals no other.
    """

    def __init__(self, inputs: dict[str, Any]) -> None:
        self.tensors = without_labels(tensors_in(inputs))
        self.is_counted = not any(value.is_inference() for value in self.tensors.values())
        self.versions = [num_writes(value) for value in self.tensors.values()] if self.is_counted else []

    def is_unchanged_from(self, earlier: _Batch) -> bool:
        """Return whether both have the same tensors, and none was written to in between."""
        return (
            self.is_counted
            and self.tensors.keys() == earlier.tensors.keys()
            and all(value is earlier.tensors[name] for name, value in self.tensors.items())
            and self.versions == earlier.versions
        )


class BayesianModelForPreferences(BayesianModelForCausalLM):
    """M causal language models as one, trained on pairs of answers.

    Attributes:
        reference: [d], the weights of the reference model.
        other_reference: a function of a batch of pairs to log p_ref [B, 2] of another reference model; None for none.
    """

    term_kind = "answers"
    predicts_its_terms: ClassVar[bool] = False
    prediction_fields = (*BayesianModelForCausalLM.prediction_fields, "reference", "other_reference", "_known")

    def __init__(
        self, model: nn.Module, layout: Layout, theta: Tensor, *, config: DirectPreferences, trunk: bool = True
    ) -> None:
        super().__init__(model, layout, theta, trunk=trunk)
        self.preferences = config
        self.likelihood = config.of_rewards()
        self.texts_per_row = self.likelihood.texts_per_row
        self.check_inputs = GroupCheck(self.core, self.texts_per_row)
        self.reference = theta.detach()[0].clone()
        self.other_reference: Callable[[dict[str, Any]], Tensor] | None = None
        self._known: tuple[_Batch, Tensor] | None = None

    @property
    def num_outputs(self) -> int:
        """The number of rewards of a row."""
        return self.texts_per_row

    @property
    def num_root_columns(self) -> int | None:
        return self.likelihood.num_root_columns(self.texts_per_row)

    def num_positions(self, inputs: dict[str, Any]) -> int:
        if not holds_groups(inputs):
            return super().num_positions(inputs)
        return self.texts_per_row * super().num_positions(flattened(inputs))

    # -- likelihood ---------------------------------------------------------------------------------------------------

    def log_lik(
        self, theta: Tensor, inputs: dict[str, Any], *, folded: bool, weights: Tensor | None = None
    ) -> MemberLogLik:
        members, labels = len(theta), inputs["labels"]
        reference = self.reference_log_probs(inputs)
        texts, tokens = self.texts_of(inputs)
        shape = (members if folded else 1, -1)
        labels, reference = labels.view(shape).expand(members, -1), reference.view(*shape, self.texts_per_row)
        is_term = self.likelihood.is_term(labels)

        def of_texts(sums: Tensor) -> Tensor:
            """Return the log-likelihood of all pairs [m], given the log-probabilities of their answers [m, 2 B]."""
            log_prob = self.likelihood.log_prob(self.rewards(sums, reference), labels)
            if weights is not None:
                log_prob = log_prob[is_term].view(members, -1) * weights[..., 0]
            return log_prob.sum(1)

        log_lik = self.causal.log_lik_of_texts(theta, texts, tokens, of_texts, folded=folded)
        return MemberLogLik(-log_lik, is_term.sum(1))

    def reference_log_probs(self, inputs: dict[str, Any]) -> Tensor:
        """Return [B, 2] float64: log p_ref of the answers of a batch of pairs.

        The members of an update may go through the model one after the other: they get the same numbers, which are
        computed once.
        """
        found = self.given_reference(inputs)
        if found is None:
            theta = self.reference[None].to(self.theta)
            with evaluating(self):
                found = self.causal.text_log_probs(theta, *self.texts_of(inputs))[0].view(-1, self.texts_per_row)
            self._known = _Batch(inputs), found
        return found

    def given_reference(self, inputs: dict[str, Any]) -> Tensor | None:
        """Return log p_ref [B, 2] float64 of a batch of pairs if it needs no pass through this model, else None."""
        if inputs.get(REFERENCE) is not None:
            return inputs[REFERENCE].double()  # type: ignore[no-any-return]
        batch = _Batch(inputs)
        if self._known is None or not batch.is_unchanged_from(self._known[0]):
            if self.other_reference is None:
                return None
            self._known = batch, self.other_reference(inputs).double()
        return self._known[1]

    def texts_of(self, inputs: dict[str, Any]) -> tuple[dict[str, Any], Tensor]:
        """Return the model's inputs for single texts, and their labels [2 B, T], the tokens of answers."""
        texts = flattened(inputs)
        answers = texts.get("completion_mask")
        if not holds_groups(inputs) or answers is None:
            raise ValueError(
                f"preferences need input_ids [rows, {self.texts_per_row}, tokens] and a completion_mask of this shape, "
                f"1 at the tokens of answers, got {sorted(inputs)}: use TRL's DPOTrainer, or a data collator that "
                "makes them (docs/dpo.md)"
            )
        mask = texts.get("attention_mask")
        labels = next_tokens(texts["input_ids"].masked_fill(answers == 0, IGNORE), mask)
        own = {name: value for name, value in texts.items() if name not in _NOT_THE_MODELS}
        return self.numbered({**own, "use_cache": False}), labels

    def rewards(self, sums: Tensor, reference: Tensor) -> Tensor:
        """Return [m, B, 2], the rewards of the answers, given their log-probabilities [m, 2 B]."""
        return self.preferences.beta * (sums.unflatten(1, (-1, self.texts_per_row)) - reference)  # type: ignore[no-any-return]

    # -- predictions of pairs -----------------------------------------------------------------------------------------

    def member_rewards(self, inputs: dict[str, Any]) -> Tensor:
        """Return [M, B, 2] float32: the rewards that the current members give to the answers of a batch of pairs."""
        texts, tokens = self.texts_of(inputs)
        found = [self.causal.text_log_probs(theta, texts, tokens) for theta in self.passes(texts)]
        return self.rewards(torch.cat(found), self.reference_log_probs(inputs)).float()

    @predicts
    def each_term(self, inputs: dict[str, Any], function: Callable[[Tensor, Tensor], Any]) -> list[Any]:
        terms = self.likelihood.is_term(inputs["labels"])
        return [function(self.member_rewards(inputs)[:, terms], inputs["labels"][terms])]

    @predicts
    def read_predictions(self, inputs: dict[str, Any], read: Reader, *, keep_logits: bool = False) -> Readings:
        self.check_inputs(inputs)
        rewards = self.member_rewards(inputs)
        found = custom_predictives.of_members(rewards, self.likelihood, self.member_group, self.mixture_temperature)
        return read(found, inputs["labels"]), found.logits if keep_logits else None
