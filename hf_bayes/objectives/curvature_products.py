"""The vector-Jacobian products (VJPs) of a pass over the data: batch by batch, for estimators and accumulators."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hf_bayes.core.rng import generator
from hf_bayes.members.inputs import num_rows_of, shape_of
from hf_bayes.members.module_hooks import LayerHooks, LayerRecord
from hf_bayes.methods.laplace.accumulators import Accumulator
from hf_bayes.methods.laplace.estimators import Estimator, Terms
from hf_bayes.uncertainty.likelihoods import Likelihood, next_tokens

VJPS_AT_ONCE = 4
"""The number of VJPs whose gradients at the backbone's output are held at once: the head runs once for all of them."""

Job = tuple[Estimator, list[Accumulator]]
"""The estimator that defines the VJPs, and the accumulators that receive them."""


class CurvaturePass:
    """The VJPs of the data, one batch after the other.

    Attributes:
        num_terms: the number of likelihood terms of the batches so far.
        log_lik: their log-likelihood in nats.
    """

    def __init__(
        self,
        model: Any,
        hooks: LayerHooks,
        jobs: list[Job],
        rows: Sequence[int],
        seed: int,
    ) -> None:
        self.model, self.hooks, self.jobs = model, hooks, jobs
        self.likelihood: Likelihood = model.likelihood
        self.rows, self.seed = iter(rows), seed
        self.num_terms, self.log_lik = 0, 0.0

    def add_batch(self, batch: dict[str, Any]) -> None:
        """Run the model on a batch, and pass the VJPs of all jobs to their accumulators."""
        raise AssertionError("a pass defines add_batch")

    @staticmethod
    def log_lik_of(model: Any, batch: dict[str, Any]) -> tuple[Tensor, int]:
        """Return the log-likelihood of a batch, differentiable in the random parameters, and its number of terms."""
        raise AssertionError("a pass defines log_lik_of")

    def _begin(self, batch: dict[str, Any], labels: Tensor) -> Tensor:
        """Begin a batch, given the labels of its terms. Return ``is_term``."""
        (rows, _), is_term, weights = shape_of(batch), self.likelihood.is_term(labels), self.likelihood.weights(labels)
        self.hooks.begin(batch, is_term if is_term.ndim == 2 else None)
        for _, accumulators in self.jobs:
            for accumulator in accumulators:
                accumulator.begin(rows, weights)
        self.num_terms += int(is_term.sum())
        return is_term

    def _vjps(self, num_outputs: int, num_ordinals: int) -> list[tuple[Estimator, int, list[Accumulator]]]:
        """Return (estimator, number of the VJP, accumulators) for every VJP of a batch."""
        return [
            (estimator, index, accumulators)
            for estimator, accumulators in self.jobs
            for index in range(estimator.num_vjps(self.likelihood, num_outputs, num_ordinals))
        ]

    def _uniforms(self, is_term: Tensor, num_outputs: int) -> Tensor:
        """Return uniform numbers [S, n] or [S, n, C] for the terms of the batch: a stream for each sample and row."""
        shape = (num_outputs,) if self.likelihood.labels_per_output else ()
        rows = [(next(self.rows), count) for count in is_term.reshape(len(is_term), -1).sum(1).tolist()]
        drawn = [
            torch.cat([
                torch.rand(count, *shape, generator=generator(self.seed, "labels", sample, row), dtype=torch.float64)
                for row, count in rows
            ])
            for sample in range(max(estimator.num_draws for estimator, _ in self.jobs))
        ]  # fmt: skip
        empty = torch.zeros(0, sum(count for _, count in rows), *shape)
        return (torch.stack(drawn) if drawn else empty).to(is_term.device)

    def _on_backward(self, accumulators: list[Accumulator], *, first: bool) -> None:
        def consume(record: LayerRecord) -> None:
            for accumulator in accumulators:
                accumulator.add(record)

        self.hooks.on_backward(consume, first=first)


class OutputPass(CurvaturePass):
    """The pass of classifiers and regressors, of rows or of tokens, and of reward models of pairs."""

    @staticmethod
    def log_lik_of(model: Any, batch: dict[str, Any]) -> tuple[Tensor, int]:
        inputs = dict(batch)
        labels = inputs.pop("labels")
        return _log_lik(model, model.outputs(inputs)[0], labels)

    def add_batch(self, batch: dict[str, Any]) -> None:
        inputs = dict(batch)
        labels = inputs.pop("labels")
        is_term = self._begin(inputs, labels)
        logits = self.model.outputs(inputs)[0]
        self.model.check_labels(logits[None], labels[None])
        flat, index = logits.flatten(0, -2), is_term.flatten().nonzero()[:, 0]
        targets = labels.flatten(0, logits.ndim - 2)[index]
        ordinals = (
            is_term.flatten(1).cumsum(1) - 1 if is_term.ndim > 1 else torch.zeros_like(is_term, dtype=torch.int64)
        )
        uniforms = self._uniforms(is_term, logits.shape[-1])
        terms = Terms(flat.detach()[index], targets, ordinals.flatten()[index], uniforms)
        self.log_lik += float(self.likelihood.log_prob(terms.logits[None], targets[None]).double().sum())
        vjps = self._vjps(logits.shape[-1], int(terms.ordinals.max()) + 1 if len(index) else 1)
        for number, (estimator, vjp, accumulators) in enumerate(vjps):
            self._on_backward(accumulators, first=number == 0)
            cotangent = torch.zeros_like(flat)
            cotangent[index] = estimator.cotangent(vjp, terms, self.likelihood).to(flat.dtype)
            torch.autograd.backward(flat, cotangent, inputs=[self.hooks.anchor], retain_graph=number + 1 < len(vjps))
            for accumulator in accumulators:
                accumulator.end_vjp()


class Tokens(NamedTuple):
    """The tokens of a batch for which the head of a language model runs.

    Attributes:
        positions: [n] their flat positions b * T + t.
        terms: their labels, ordinals and uniforms; the logits come from the head.
        row_length: the number of flat positions in a row.
    """

    positions: Tensor
    terms: Terms
    row_length: int

    def terms_at(self, places: Tensor) -> Terms:
        """Return the terms of the tokens in these places of ``positions``."""
        terms = self.terms
        return Terms(terms.logits, terms.labels[places], terms.ordinals[places], terms.uniforms[:, places])


class CausalPass(CurvaturePass):
    """The pass of causal language models: the head runs on a few positions at a time, as in training."""

    @staticmethod
    def log_lik_of(model: Any, batch: dict[str, Any]) -> tuple[Tensor, int]:
        inputs = model.numbered({**batch, "use_cache": False})
        labels = next_tokens(inputs.pop("labels"), inputs.get("attention_mask"))
        return _log_lik(model, model.outputs(inputs)[0], labels)

    def add_batch(self, batch: dict[str, Any]) -> None:
        if (num_rows := num_rows_of(batch)) > 1 and not self.model.reads_rows_apart(batch):
            for row in range(num_rows):
                self.add_batch(self.model.take_rows(batch, torch.tensor([row])))
            return
        head, inputs = self.model.head, self.model.numbered({**batch, "use_cache": False})
        labels, mask = inputs.pop("labels"), inputs.get("attention_mask")
        if mask is None:  # what follows a row's last label may be padding; no term reads it
            mask = self.likelihood.is_term(labels).flip(1).cumsum(1).flip(1) > 0
        labels = next_tokens(labels, inputs.get("attention_mask"))
        inputs.pop("logits_to_keep", None)
        is_term = self._begin({**inputs, "attention_mask": mask}, labels)
        ordinals = is_term.cumsum(1) - 1
        hidden, output = head.hidden(inputs)
        index = is_term.flatten().nonzero()[:, 0]
        vocabulary = self.model.core.get_output_embeddings().weight.shape[0]
        terms = Terms(
            torch.empty(0),
            labels.flatten()[index],
            ordinals.flatten()[index],
            self._uniforms(is_term, vocabulary),
        )
        vjps = self._vjps(vocabulary, int(is_term.sum(1).max()))
        self._backward(hidden, output, Tokens(index, terms, labels.shape[1]), vjps)

    def _backward(
        self, hidden: Tensor, output: Any, tokens: Tokens, vjps: list[tuple[Estimator, int, list[Accumulator]]]
    ) -> None:
        """Pass the VJPs of the tokens of a batch to their accumulators, given the states of the backbone."""
        head, index = self.model.head, tokens.positions
        flat = hidden.reshape(1, -1, hidden.shape[-1])
        random_head = not _within(head.backbone, self.hooks)
        places = torch.arange(len(index), device=index.device)
        size = 1 if random_head else VJPS_AT_ONCE
        for start in range(0, len(vjps), size):
            group = vjps[start : start + size]
            cotangents = [torch.zeros_like(flat) for _ in group]
            chunks = self._row_chunks(tokens) if random_head else places.split(max(1, head.chunk_size(hidden)))
            for number, part in enumerate(chunks):
                if not len(part):
                    continue
                self._vjps_of_head(flat, output, index[part], tokens.terms_at(part), group, cotangents,
                                   first=start == 0, row=number if random_head else None)  # fmt: skip
            for number, ((_, _, accumulators), cotangent) in enumerate(zip(group, cotangents, strict=True)):
                self._on_backward(accumulators, first=start + number == 0)
                if hidden.requires_grad:
                    torch.autograd.backward(
                        hidden,
                        cotangent.view_as(hidden),
                        inputs=[self.hooks.anchor],
                        retain_graph=start + number + 1 < len(vjps),
                    )
                for accumulator in accumulators:
                    accumulator.end_vjp()

    def _vjps_of_head(
        self, flat: Tensor, output: Any, index: Tensor, terms: Terms, group: list[Any], cotangents: list[Tensor],
        *, first: bool, row: int | None,
    ) -> None:  # fmt: skip
        """Add the log-likelihood of some positions, and the VJPs of ``group`` down to the hidden states."""
        piece = flat[:, index].detach().requires_grad_()
        with nullcontext() if row is None else self._one_row(row, terms):
            logits = self.model.head.logits(piece, output)
            terms = terms._replace(logits=logits.detach()[0])
            if first:
                self._add_log_lik(terms)
            for number, (estimator, vjp, accumulators) in enumerate(group):
                self._on_backward(accumulators, first=first and number == 0)
                cotangent = estimator.cotangent(vjp, terms, self.likelihood).to(logits.dtype)
                inputs = [piece] if row is None else [piece, self.hooks.anchor]
                piece.grad = None
                torch.autograd.backward(logits, cotangent[None], inputs=inputs, retain_graph=number + 1 < len(group))
                assert piece.grad is not None
                cotangents[number].index_add_(1, index, piece.grad)

    def _add_log_lik(self, terms: Terms) -> None:
        """Add the log-likelihood of some tokens."""
        log_probs = self.likelihood.log_prob(terms.logits[None], terms.labels[None])
        self.log_lik += float(log_probs.double().sum())

    def _row_chunks(self, tokens: Tokens) -> Iterator[Tensor]:
        """Yield the places of each row in ``tokens.positions``: a random head takes one row at a time."""
        places, owner = (
            torch.arange(len(tokens.positions), device=tokens.positions.device),
            tokens.positions // tokens.row_length,
        )
        for row in range(int(owner.max()) + 1 if len(owner) else 0):
            yield places[owner == row]

    def _one_row(self, row: int, terms: Terms) -> AbstractContextManager[None]:
        """Return the context in which the head takes the tokens ``terms`` of one row."""
        return self.hooks.one_row(row)


def _log_lik(model: Any, logits: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    """Return the log-likelihood of labels under the outputs ``logits`` [B, ..., C], and the number of its terms."""
    labels = labels.flatten(0, logits.ndim - 2)
    value = model.likelihood.log_prob(logits.view(1, -1, logits.shape[-1]), labels[None]).sum()
    return value, int(model.likelihood.is_term(labels).sum())


def _within(backbone: nn.Module, hooks: LayerHooks) -> bool:
    """Return whether all hooks are in the backbone."""
    inside = {id(module) for module in backbone.modules()}
    return all(id(layer.module) in inside for layer in hooks.layers)
