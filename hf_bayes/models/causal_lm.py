"""M causal language models as one: the mixture's logits, generation with uncertainty, scores of given text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast

from hf_bayes.members.trunk import num_positions_of, num_rows_of
from hf_bayes.metrics import per_row_statistics
from hf_bayes.models.base import MemberLogLik, predicts, term_statistics
from hf_bayes.models.decoding import Decoding
from hf_bayes.models.input_check import require_ids
from hf_bayes.uncertainty.gaussian_links import GaussianPrediction
from hf_bayes.uncertainty.likelihoods import IGNORE, next_tokens, refuse_labels


@dataclass
class BayesianCausalLMOutput(CausalLMOutputWithPast):
    """``logits`` [B, T, V] are the log of the mixture; uncertainties [B, T] in nats."""

    total: Tensor | None = None
    aleatoric: Tensor | None = None
    epistemic: Tensor | None = None


class BayesianModelForCausalLM(Decoding):
    """M causal language models as one: ``generate`` samples from the posterior predictive, token by token."""

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        *,
        theta: Tensor | None = None,
        folded: bool = False,
        **kwargs: Any,
    ) -> BayesianCausalLMOutput | MemberLogLik:
        """The mixture of all members; with ``theta``, what training needs of them instead (``log_lik``).

        Args:
            labels: [B, T]; the loss is the mean negative log-likelihood of the mixture over its terms.
            logits_to_keep: as in transformers: the last k positions, or a tensor of positions; 0 means all.
        Returns:
            Logits [B, T, V] (float32) and uncertainties [B, T].
        Raises:
            ValueError: for outputs that have no meaning for a mixture (hidden states, attentions), and for inputs that
                ``InputCheck`` refuses.
        """
        if kwargs.pop("output_hidden_states", None) or kwargs.pop("output_attentions", None):
            raise ValueError("hidden states and attentions differ from member to member: ask members of `model.core`")
        kwargs.pop("return_dict", None)
        kwargs.pop("num_items_in_batch", None)
        named = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids,
                 "inputs_embeds": inputs_embeds, "use_cache": use_cache}  # fmt: skip
        inputs = {**{k: v for k, v in named.items() if v is not None}, **kwargs}
        self.refuse_unknown_inputs(inputs)
        if theta is not None:
            return self.log_lik(theta, {**inputs, "labels": labels}, folded=folded)
        if self._trace is not None and input_ids is not None:
            self._trace.chosen(input_ids[:, -1])
        elif input_ids is not None and past_key_values is not None:
            require_ids(input_ids)  # a step of somebody's own decoding, which is not to wait for the device
        elif self._trace is None:
            self.check_inputs(inputs)
        return self._answer(inputs, past_key_values, labels, logits_to_keep)

    @predicts
    def _answer(
        self, inputs: dict[str, Any], cache: Any, labels: Tensor | None, logits_to_keep: int | Tensor
    ) -> BayesianCausalLMOutput:
        """``forward`` of the mixture."""
        if self._linearised is not None:
            if cache is not None:
                raise ValueError(
                    "past_key_values do not hold the derivatives of a linearised model's keys and values: give the "
                    "whole text, without a cache; generate does so by itself. linearise(None) goes back to members"
                )
            inputs = {**inputs, "use_cache": False}
        with self._tangents():
            return self._answer_whole(inputs, cache, labels, logits_to_keep)

    def _answer_whole(
        self, inputs: dict[str, Any], cache: Any, labels: Tensor | None, logits_to_keep: int | Tensor
    ) -> BayesianCausalLMOutput:
        tail, kept = self.members.tail, logits_to_keep if isinstance(logits_to_keep, int) else 0
        if tail.once is None and 0 < kept < num_positions_of(inputs):
            names = ("input_ids", "inputs_embeds")
            token = {name: inputs[name][:1, :1] for name in names if inputs.get(name) is not None}
            with self.members.bind(self.current[:1]):
                tail.look(lambda: self.head.hidden({**token, "use_cache": False}))
        with tail.only(kept or None):
            hidden, output, cache = self._hidden(inputs, cache)
        rows, length = num_rows_of(inputs), hidden.shape[1]
        steps = _kept(logits_to_keep, length, hidden.device)
        positions = (torch.arange(rows, device=hidden.device)[:, None] * length + steps).flatten()
        log_probs, uncertainties = self._predict(hidden, output, rows, positions)
        logits = log_probs.view(rows, len(steps), -1)
        loss = None
        if labels is not None:
            refuse_labels(self.likelihood, labels, self.num_outputs)
            targets = next_tokens(labels, inputs.get("attention_mask"))[:, steps]
            terms = self.likelihood.is_term(targets)
            loss = -self.likelihood.log_prob(logits, targets).sum() / terms.sum().clamp_min(1)
        shape = (rows, len(steps))
        return BayesianCausalLMOutput(
            loss=loss,
            logits=logits,
            past_key_values=cache,
            **{name: value.view(shape) for name, value in uncertainties.items()},
        )

    @predicts
    def evaluate_batch(
        self, inputs: dict[str, Any], *, keep_logits: bool = False
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        self.check_inputs(inputs)
        refuse_labels(self.likelihood, inputs["labels"], self.num_outputs)
        found = [self._evaluate_rows(rows, keep_logits) for rows in self._row_slices(inputs)]
        statistics = {name: torch.cat([piece[name] for piece, _ in found]) for name in found[0][0]}
        kept = [logits for _, logits in found if logits is not None]
        return statistics, torch.cat(kept) if kept else None

    def _evaluate_rows(self, inputs: dict[str, Any], keep_logits: bool) -> tuple[dict[str, Tensor], Tensor | None]:
        inputs = {**inputs, "use_cache": False}
        targets = next_tokens(inputs.pop("labels"), inputs.get("attention_mask"))
        rows, flat = targets.shape[0], targets.flatten()
        wanted = torch.arange(len(flat), device=flat.device)
        if not keep_logits:
            wanted = self.likelihood.is_term(flat).nonzero()[:, 0]
        pieces, logits_kept = [], []
        with self._tangents():
            hidden, output, _ = self._hidden(self.numbered(inputs), None)
            for log_probs, statistics in self._judged(hidden, output, rows, wanted, flat):
                pieces.append(statistics)
                if keep_logits:
                    logits_kept.append(log_probs)
        statistics = {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}
        return statistics, torch.cat(logits_kept).view(*targets.shape, -1) if keep_logits else None

    def _judged(
        self, hidden: Tensor, output: Any, rows: int, positions: Tensor, labels: Tensor
    ) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        """Chunk by chunk of flat positions: log_probs [n, V], and the statistics of the terms among flat ``labels``."""
        if self._closed is not None:
            for index, closed in self._closed_predictions(self._closed, hidden, output, rows, positions):
                yield closed.log_probs, _closed_statistics(closed, labels[index])
            return
        for index, logits in self._logits(hidden, output, rows, positions):
            prediction = self.spread.predict(logits)
            yield prediction.log_probs, term_statistics(prediction, logits, labels[index], self.spread)

    def _predict(self, hidden: Tensor, output: Any, rows: int, positions: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The mixture at flat positions: log_probs [n, V] and, by name, uncertainties [n]."""
        pieces: list[tuple[Tensor, dict[str, Tensor]]] = []
        if self._closed is not None:
            for _, closed in self._closed_predictions(self._closed, hidden, output, rows, positions):
                pieces.append((closed.log_probs, closed.uncertainties))
        else:
            for _, logits in self._logits(hidden, output, rows, positions):
                prediction = self.spread.predict(logits)
                pieces.append((prediction.log_probs, prediction.uncertainty._asdict()))
                if self._trace is not None:
                    self._trace.observe(prediction, logits)
        if len(pieces) == 1:  # every step of decoding
            return pieces[0]
        log_probs = torch.cat([piece for piece, _ in pieces])
        return log_probs, {name: torch.cat([parts[name] for _, parts in pieces]) for name in pieces[0][1]}


def _closed_statistics(prediction: GaussianPrediction, labels: Tensor) -> dict[str, Tensor]:
    """As of ``term_statistics``, without what members alone have."""
    terms = labels != IGNORE
    uncertainties = {name: value[terms] for name, value in prediction.uncertainties.items()}
    return {**per_row_statistics(prediction.log_probs[terms], labels[terms]), **uncertainties}


def _kept(logits_to_keep: int | Tensor, length: int, device: torch.device) -> Tensor:
    steps = torch.arange(length, device=device)
    if isinstance(logits_to_keep, Tensor):
        return logits_to_keep.to(device)
    return steps[-logits_to_keep:] if logits_to_keep else steps
