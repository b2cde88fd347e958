"""Uncertainty of every token that is generated or scored, collected while the mixture is at hand."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_bayes.uncertainty import Prediction

_REFUSED = ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit", "custom_generate", "penalty_alpha",
            "dola_layers", "prefill_chunk_size")  # fmt: skip


class Scores(NamedTuple):
    """Per token and per sequence, in nats, of the raw mixture. NaN where a token is padding.

    Attributes:
        total: [rows, tokens] entropy of the mixture at the token's position.
        aleatoric: [rows, tokens] mean entropy of the members.
        epistemic: [rows, tokens] total - aleatoric.
        logprobs: [rows, tokens] log-probability of the token under the mixture.
        sequence_logprob: [rows] log mean_m prod_t p_m(token t): the posterior predictive of the sequence.
        sequence_logprob_tokenwise: [rows] the sum of ``logprobs``, which is another number (docs/uncertainty.md).
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
    """What is kept of n positions once their tokens are known.

    Args:
        prediction: of ``logits``.
        logits: [M, n, V] of the members.
        tokens: [n].
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    chosen = logits.gather(-1, tokens.expand(len(logits), -1)[..., None])[..., 0]
    mixture = prediction.log_probs.gather(-1, tokens[:, None])[:, 0]
    return TokenRecord(*prediction.uncertainty, mixture, chosen - logits.logsumexp(-1))


def to_scores(tokens: TokenRecord, valid: Tensor) -> Scores:
    """Lay tokens out in rows.

    Args:
        tokens: the n tokens at the True places of ``valid``, row by row.
        valid: [rows, tokens] bool.
    """

    def lay_out(values: Tensor, fill: float) -> Tensor:
        grid = torch.full((*values.shape[:-1], *valid.shape), fill, dtype=values.dtype, device=values.device)
        grid[..., valid] = values
        return grid

    per_token = [lay_out(values, math.nan) for values in tokens[:4]]
    per_member = lay_out(tokens.member_logprobs, 0.0).sum(-1)
    sequence = per_member.logsumexp(0) - math.log(len(per_member))
    return Scores(*per_token, sequence, lay_out(tokens.logprobs, 0.0).sum(-1))


class GenerationTrace:
    """Watches the forwards of one ``generate`` call. The token of a step is known one step later."""

    def __init__(self) -> None:
        self.steps: list[TokenRecord] = []
        self.pending: list[tuple[Prediction, Tensor]] = []

    def chosen(self, tokens: Tensor) -> None:
        """The tokens [rows] that were drawn from the positions observed last."""
        if self.pending:
            pieces, start = [], 0
            for prediction, logits in self.pending:
                pieces.append(record(prediction, logits, tokens[start : start + logits.shape[1]]))
                start += logits.shape[1]
            self.steps.append(join(pieces))
        self.pending = []

    def observe(self, prediction: Prediction, logits: Tensor) -> None:
        """A chunk of the rows of the current step: its prediction, and its members' logits [M, n, V]."""
        self.pending.append((prediction, logits))

    def scores(self, new_tokens: Tensor, ends: Tensor) -> Scores | None:
        """Scores of [rows, steps] new tokens of which row r has ``ends[r]``; None where rows and steps do not match."""
        if new_tokens.shape[1] == 0 or any(len(step.total) != len(new_tokens) for step in self.steps):
            return None
        self.chosen(new_tokens[:, -1])
        if len(self.steps) != new_tokens.shape[1]:
            return None
        valid = torch.arange(new_tokens.shape[1], device=ends.device) < ends[:, None]
        grid = TokenRecord(*(torch.stack(values, -1) for values in zip(*self.steps, strict=True)))
        return to_scores(TokenRecord(*(values[..., valid] for values in grid)), valid)


def join(records: list[TokenRecord]) -> TokenRecord:
    """Records of consecutive tokens as one."""
    return TokenRecord(*(torch.cat(values, -1) for values in zip(*records, strict=True)))


def refuse_unsupported(kwargs: dict[str, Any]) -> None:
    """Raise for ways of generating whose caches or loops know nothing of members."""
    config = kwargs.get("generation_config")
    for name in _REFUSED:
        if kwargs.get(name) is not None or getattr(config, name, None) is not None:
            raise ValueError(
                f"generate({name}=...) is not supported for an ensemble: it handles the cache row by row. "
                "Supported are greedy search, sampling and beam search"
            )
