"""The uncertainty of every generated or scored token, recorded as soon as its mixture is computed."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import StoppingCriteriaList
from transformers.generation import BaseStreamer  # type: ignore[attr-defined]

from hf_bayes.members.member_sums import LocalMembers
from hf_bayes.uncertainty.decomposition import Prediction
from hf_bayes.uncertainty.likelihoods import widened


class Scores(NamedTuple):
    """Numbers of the raw mixture in nats, per token and per sequence. NaN at tokens that are padding.

    Attributes:
        total: [rows, tokens] entropy of the mixture at the token's position.
        aleatoric: [rows, tokens] mean entropy of the members.
        epistemic: [rows, tokens] total - aleatoric.
        logprobs: [rows, tokens] log-probability of the token under the mixture.
        sequence_logprob: [rows] log mean_m prod_t p_m(token t): the posterior predictive of the sequence.
        sequence_logprob_tokenwise: [rows] the sum of ``logprobs``, a different quantity (docs/uncertainty.md).
    """

    total: Tensor
    aleatoric: Tensor
    epistemic: Tensor
    logprobs: Tensor
    sequence_logprob: Tensor
    sequence_logprob_tokenwise: Tensor


class TokenRecord(NamedTuple):
    """A batch of n tokens: uncertainties and mixture log-probability [n], the members' log-probabilities [M, n]."""

    total: Tensor
    aleatoric: Tensor
    epistemic: Tensor
    logprobs: Tensor
    member_logprobs: Tensor


def record(prediction: Prediction, logits: Tensor, tokens: Tensor) -> TokenRecord:
    """Return the record of n positions whose tokens are known.

    Args:
        prediction: the mixture of ``logits``.
        logits: [M, n, V] logits of the members.
        tokens: [n].
    """
    logits = widened(logits)
    chosen = logits.gather(-1, tokens.expand(len(logits), -1)[..., None])[..., 0]
    mixture = prediction.log_probs.gather(-1, tokens[:, None])[:, 0]
    return TokenRecord(*prediction.uncertainty, mixture, chosen - logits.logsumexp(-1))


def to_scores(tokens: TokenRecord, valid: Tensor, group: LocalMembers) -> Scores:
    """Return the scores of tokens, arranged in rows.

    Args:
        tokens: the n tokens at the True places of ``valid``, row by row.
        valid: [rows, tokens] bool.
        group: the processes that hold the members.
    """

    def lay_out(values: Tensor, fill: float) -> Tensor:
        grid = torch.full((*values.shape[:-1], *valid.shape), fill, dtype=values.dtype, device=values.device)
        grid[..., valid] = values
        return grid

    per_token = {name: lay_out(getattr(tokens, name), math.nan) for name in Scores._fields[:4]}
    per_member = lay_out(tokens.member_logprobs, 0.0).sum(-1)
    sequence = group.log_mean_exp(per_member)
    tokenwise = lay_out(tokens.logprobs, 0.0).sum(-1)
    return Scores(**per_token, sequence_logprob=sequence, sequence_logprob_tokenwise=tokenwise)


class GenerationTrace:
    """The record of one ``generate`` call: its forward passes, its stopping criteria and, with a streamer, its tokens.

    A forward pass shows the token of the step before it. A ``TraceStreamer`` receives a token as soon as it is drawn.

    Attributes:
        steps: one record per token drawn so far.
        lengths: [rows] number of tokens of each row until it stopped, the last one included.
        prompt_mask: the prompt's attention mask, as given to generate or inferred by it.
    """

    def __init__(self, group: LocalMembers) -> None:
        self.group = group
        self.steps: list[TokenRecord] = []
        self.pending: list[tuple[Prediction, Tensor]] = []
        self.lengths = torch.zeros(0, dtype=torch.long)
        self.prompt_mask: Tensor | None = None
        self._stopped = torch.zeros(0, dtype=torch.bool)

    def step(self, index: int, tokens: Tensor) -> TokenRecord:
        """Return the record of a step whose ``tokens`` [rows] are known: the pending step, or an earlier one."""
        if index == len(self.steps):
            self.chosen(tokens.to(self.pending[0][1].device))
        return self.steps[index]

    def judged(self, stopped: Tensor) -> None:
        """Record which rows the stopping criteria end after a token, [rows] bool."""
        if not len(self.lengths):
            self._stopped, self.lengths = torch.zeros_like(stopped), torch.zeros_like(stopped, dtype=torch.long)
        self.lengths += ~self._stopped
        self._stopped = self._stopped | stopped

    def chosen(self, tokens: Tensor) -> None:
        """Record the tokens [rows] that were drawn at the positions observed last."""
        if self.pending:
            pieces, start = [], 0
            for prediction, logits in self.pending:
                pieces.append(record(prediction, logits, tokens[start : start + logits.shape[1]]))
                start += logits.shape[1]
            self.steps.append(join(pieces))
        self.pending = []

    def observe(self, prediction: Prediction, logits: Tensor) -> None:
        """Record a chunk of the current step's rows: its prediction, and its members' logits [M, n, V]."""
        self.pending.append((prediction, logits))

    def scores(self, new_tokens: Tensor, ends: Tensor) -> Scores | None:
        """Return scores of [rows, steps] new tokens, ``ends[r]`` in row r; None if rows or steps do not match."""
        if new_tokens.shape[1] == 0 or any(len(step.total) != len(new_tokens) for step in self.steps):
            return None
        if len(self.steps) < new_tokens.shape[1]:  # on CUDA generate runs one forward pass too many, without its token
            self.chosen(new_tokens[:, -1])
        if len(self.steps) != new_tokens.shape[1]:
            return None
        valid = torch.arange(new_tokens.shape[1], device=ends.device) < ends[:, None]
        grid = TokenRecord(*(torch.stack(values, -1) for values in zip(*self.steps, strict=True)))
        return to_scores(TokenRecord(*(values[..., valid] for values in grid)), valid, self.group)


class WatchedCriteria(StoppingCriteriaList):
    """Stopping criteria that record in a trace when rows stop, for any criteria that were given."""

    def __init__(self, criteria: Iterable[Any], trace: GenerationTrace) -> None:
        super().__init__(criteria)
        self.trace = trace

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        stopped: Tensor = super().__call__(input_ids, scores, **kwargs)
        self.trace.judged(stopped)
        return stopped


class TraceStreamer(BaseStreamer):
    """A streamer of ``generate`` that receives each token with its record as soon as the token is drawn.

    Subclasses define ``on_step`` and may define ``end``. One instance serves one call.
    """

    def __init__(self) -> None:
        self._trace: GenerationTrace | None = None
        self._num_steps = -1  # generate puts the prompt first

    def watch(self, trace: GenerationTrace) -> None:
        """Connect the streamer with the trace of a ``generate``, which calls this method.

        Raises:
            ValueError: if it was called before.
        """
        if self._trace is not None:
            raise ValueError(
                f"{type(self).__name__} serves one call: make another for the next, and give a pipeline one prompt at "
                "a time, because it calls generate for each"
            )
        self._trace = trace

    def put(self, value: Tensor) -> None:
        if self._trace is None:
            raise ValueError(f"{type(self).__name__} streams from a Bayesian model's generate only")
        if self._num_steps >= 0:
            self.on_step(value, self._trace.step(self._num_steps, value))
        self._num_steps += 1

    def on_step(self, tokens: Tensor, record: TokenRecord) -> None:
        """Take the tokens [rows] that were drawn, and their record."""
        raise AssertionError("a TraceStreamer defines on_step")

    def end(self) -> None:
        """Take the end of the stream."""


def join(records: list[TokenRecord]) -> TokenRecord:
    """Return records of consecutive tokens as one record."""
    return TokenRecord(*(torch.cat(values, -1) for values in zip(*records, strict=True)))
