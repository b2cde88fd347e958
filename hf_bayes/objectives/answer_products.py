"""The vector-Jacobian products (VJPs) of preferences between answers, the likelihood of DPO.

A pair is one likelihood term, and its outputs are the rewards of its two answers,

    r_j = beta (sum_t log p(y_jt | x, y_j,<t) - log p_ref(y_j | x)).

The reference has no random parameter. A cotangent c [2] of the rewards therefore gives each token of answer j the
cotangent beta c_j times the score of the token. The head runs twice on a few positions at a time: first for the
rewards, which determine c, and then for the VJPs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_bayes.members.single_member import weights_of
from hf_bayes.methods.laplace.accumulators import Accumulator
from hf_bayes.methods.laplace.estimators import Estimator, Terms
from hf_bayes.objectives.curvature_products import CausalPass, Tokens
from hf_bayes.uncertainty.likelihoods import Categorical, Likelihood

if TYPE_CHECKING:
    from hf_bayes.models.preferences import BayesianModelForPreferences

_TOKENS = Categorical()


@dataclass(frozen=True)
class OfAnswers:
    """An estimator whose cotangents at tokens are computed from the cotangents of the answers.

    Attributes:
        weights: [2 B + 1] the cotangent of the log-probability of each answer, and 0 for tokens that belong to no
            answer.
    """

    weights: Tensor
    num_draws: int = 0

    def num_vjps(self, likelihood: Likelihood, num_outputs: int, num_ordinals: int) -> int:
        return 1

    def cotangent(self, vjp: int, terms: Terms, likelihood: Likelihood) -> Tensor:
        """Return the cotangents [n, V] of tokens; an ordinal is the number of the token's answer, or -1 for none."""
        score = _TOKENS.score(terms.logits, terms.labels)
        return score * self.weights[terms.ordinals].to(score.dtype)[:, None]


class AnswerPass(CausalPass):
    """The pass of language models on pairs of answers."""

    @staticmethod
    def log_lik_of(model: Any, batch: dict[str, Any]) -> tuple[Tensor, int]:
        texts, tokens = model.texts_of(batch)
        reference, labels = _reference(model, batch, texts, tokens), batch["labels"]
        logits = model.outputs(texts)[0]
        sums = _TOKENS.log_prob(logits.flatten(0, 1)[None], tokens.flatten()[None]).view(tokens.shape).sum(1)
        rewards = model.rewards(sums[None], reference)
        return model.likelihood.log_prob(rewards, labels[None]).sum(), int(model.likelihood.is_term(labels).sum())

    def add_batch(self, batch: dict[str, Any]) -> None:
        model: BayesianModelForPreferences = self.model
        texts, tokens = model.texts_of(batch)
        labels, mask = batch["labels"], batch.get("attention_mask")
        if mask is None:  # what follows an answer may be padding; no term reads it
            mask = batch["completion_mask"].flip(2).cumsum(2).flip(2) > 0
        is_term = self._begin({**batch, "attention_mask": mask}, labels)
        with self.hooks.one_row(0):  # nothing is differentiated here, and the head has no rows of the batch
            reference = _reference(model, batch, texts, tokens)
        hidden, output = model.head.hidden(texts)
        index = _TOKENS.is_term(tokens).flatten().nonzero()[:, 0]
        none = torch.empty(0, len(index), device=index.device)  # labels are drawn for pairs, not for tokens
        answers = Terms(none, tokens.flatten()[index], index // tokens.shape[1], none)
        rewards = model.rewards(self._log_probs(hidden, output, index, answers, len(tokens))[None], reference)[0]
        pairs = Terms(
            rewards[is_term],
            labels[is_term],
            torch.zeros_like(labels[is_term]),
            self._uniforms(is_term, model.num_outputs),
        )
        self.log_lik += float(self.likelihood.log_prob(pairs.logits[None], pairs.labels[None]).sum())
        vjps: list[tuple[Estimator, int, list[Accumulator]]] = []
        for estimator, vjp, accumulators in self._vjps(model.num_outputs, 1):
            cotangent = torch.zeros_like(rewards)
            cotangent[is_term] = estimator.cotangent(vjp, pairs, self.likelihood).to(cotangent)
            weights = torch.nn.functional.pad(model.preferences.beta * cotangent.flatten(), (0, 1))
            vjps.append((OfAnswers(weights), 0, accumulators))
        row_length = model.texts_per_row * tokens.shape[1]
        self._backward(hidden, output, _with_filling(Tokens(index, answers, row_length)), vjps)

    def _log_probs(self, hidden: Tensor, output: Any, index: Tensor, answers: Terms, num_answers: int) -> Tensor:
        """Return [2 B] float64, the log-probabilities of all answers."""
        head, flat = self.model.head, hidden.detach().reshape(1, -1, hidden.shape[-1])
        sums = flat.new_zeros(num_answers, dtype=torch.float64)
        places = torch.arange(len(index), device=index.device)
        with torch.no_grad(), self.hooks.one_row(0):
            for part in places.split(head.chunk_size(hidden)) if len(index) else ():
                logits = head.logits(flat[:, index[part]], output)[0]
                log_probs = _TOKENS.log_prob(logits[None], answers.labels[part][None])[0]
                sums.index_add_(0, answers.ordinals[part], log_probs.double())
        return sums

    def _add_log_lik(self, terms: Terms) -> None:
        """Add nothing: ``add_batch`` has already added the likelihood of the choices."""

    def _row_chunks(self, tokens: Tokens) -> Iterator[Tensor]:
        """Yield the places of the answers of each pair, filled up to equal length."""
        answers, texts = tokens.terms.ordinals, self.model.texts_per_row
        for start in range(0, int(answers.max()) + 1 if len(answers) else 0, texts):
            own = [(answers == start + text).nonzero()[:, 0] for text in range(texts)]
            longest = max(len(places) for places in own)
            filling = len(answers) - 1
            yield torch.cat([
                torch.nn.functional.pad(places, (0, longest - len(places)), value=filling) for places in own
            ])  # fmt: skip

    def _one_row(self, row: int, terms: Terms) -> AbstractContextManager[None]:
        return self.hooks.one_row(row, terms.ordinals[None] >= 0, self.model.texts_per_row)


def _with_filling(tokens: Tokens) -> Tokens:
    """Return the tokens and one that belongs to no answer, which fills up the shorter answer of a pair."""
    index, terms = tokens.positions, tokens.terms
    last = terms.labels[-1:]
    ordinals = torch.cat([terms.ordinals, terms.ordinals.new_full((len(last),), -1)])
    uniforms = terms.uniforms.new_zeros(0, len(ordinals))
    terms = Terms(terms.logits, torch.cat([terms.labels, last]), ordinals, uniforms)
    return tokens._replace(positions=torch.cat([index, index[-1:]]), terms=terms)


def _reference(
    model: BayesianModelForPreferences, batch: dict[str, Any], texts: dict[str, Any], tokens: Tensor
) -> Tensor:
    """Return log p_ref [B, 2] of a batch of pairs; the model is a single one here (``as_single_model``)."""
    found = model.given_reference(batch)
    if found is not None:
        return found
    own = model.reference.to(model.theta)
    with weights_of(model.members, own):
        return model.causal.text_log_probs(own[None], texts, tokens)[0].view(-1, model.texts_per_row)
