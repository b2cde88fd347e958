"""Uncertainty of every token that is generated or scored, collected while the mixture is at hand."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import DynamicCache, GenerationConfig, StaticCache, StoppingCriteriaList
from transformers.generation import BaseStreamer

from hf_bayes.distributed.member_sums import LocalMembers
from hf_bayes.uncertainty.decomposition import Prediction
from hf_bayes.uncertainty.likelihoods import widened

_ASSISTED = "drafted tokens are checked several at a time, and uncertainty is recorded token by token"
_OTHER_LOOP = "it runs a decoding loop of its own, whose steps are not recorded"
_SECOND_PROMPT = "it calls the model a second time in every step, with another prompt"
_REFUSED = {
    **dict.fromkeys(
        ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp", "speculation_type"),
        _ASSISTED,
    ),
    **dict.fromkeys(
        ("custom_generate", "penalty_alpha", "dola_layers", "num_beam_groups", "constraints", "force_words_ids"),
        _OTHER_LOOP,
    ),
    **dict.fromkeys(("guidance_scale", "negative_prompt_ids"), _SECOND_PROMPT),
    "inputs_embeds": "records are of tokens, and such a prompt has none: give input_ids, or call the model itself",
    "prefill_chunk_size": "pieces of the prompt would be recorded as tokens",
    "token_healing": "it generates the end of the prompt anew, and that would be recorded, too",
}
"""Settings of generate that are refused, and why."""
_NEUTRAL = {"num_beam_groups": 1, "guidance_scale": 1}
"""What old generation configs say where nothing is asked for."""
_READ_AGAIN = "beams are read once more when they have ended, as input_ids and their mask alone: give the whole text"
"""A mask is longer where a cache holds what is not among the ``input_ids``."""
_CACHE = "this cache is not known to keep the rows of members apart"
_CACHES = ("dynamic", "static", "hybrid", "hybrid_chunked", "sliding_window")
"""The last three are transformers' former names of static caches for layers that slide."""
_SUPPORTED = "Supported are greedy search, sampling and beam search, with dynamic or static caches"


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
    logits = widened(logits)
    chosen = logits.gather(-1, tokens.expand(len(logits), -1)[..., None])[..., 0]
    mixture = prediction.log_probs.gather(-1, tokens[:, None])[:, 0]
    return TokenRecord(*prediction.uncertainty, mixture, chosen - logits.logsumexp(-1))


def to_scores(tokens: TokenRecord, valid: Tensor, spread: LocalMembers) -> Scores:
    """Lay tokens out in rows.

    Args:
        tokens: the n tokens at the True places of ``valid``, row by row.
        valid: [rows, tokens] bool.
        spread: where the members are.
    """

    def lay_out(values: Tensor, fill: float) -> Tensor:
        grid = torch.full((*values.shape[:-1], *valid.shape), fill, dtype=values.dtype, device=values.device)
        grid[..., valid] = values
        return grid

    per_token = {name: lay_out(getattr(tokens, name), math.nan) for name in Scores._fields[:4]}
    per_member = lay_out(tokens.member_logprobs, 0.0).sum(-1)
    sequence = spread.log_mean_exp(per_member)
    tokenwise = lay_out(tokens.logprobs, 0.0).sum(-1)
    return Scores(**per_token, sequence_logprob=sequence, sequence_logprob_tokenwise=tokenwise)


class GenerationTrace:
    """Watches one ``generate`` call: its forwards, its stopping criteria and, through a streamer, its tokens.

    The token of a step is known one step later, at the next forward; a ``TraceStreamer`` knows it at once.

    Attributes:
        steps: one record per token drawn so far.
        lengths: [rows] how many tokens each row has until it stopped, that one included.
        prompt_mask: the prompt's attention mask, as given to generate or inferred by it.
    """

    def __init__(self, spread: LocalMembers) -> None:
        self.spread = spread
        self.steps: list[TokenRecord] = []
        self.pending: list[tuple[Prediction, Tensor]] = []
        self.lengths = torch.zeros(0, dtype=torch.long)
        self.prompt_mask: Tensor | None = None
        self._stopped = torch.zeros(0, dtype=torch.bool)

    def step(self, index: int, tokens: Tensor) -> TokenRecord:
        """The record of a step whose ``tokens`` [rows] are known: the step that is pending, or one before it."""
        if index == len(self.steps):
            self.chosen(tokens.to(self.pending[0][1].device))
        return self.steps[index]

    def judged(self, stopped: Tensor) -> None:
        """What the stopping criteria say of each row after a token: [rows] bool."""
        if not len(self.lengths):
            self._stopped, self.lengths = torch.zeros_like(stopped), torch.zeros_like(stopped, dtype=torch.long)
        self.lengths += ~self._stopped
        self._stopped = self._stopped | stopped

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
        if len(self.steps) < new_tokens.shape[1]:  # on CUDA generate runs one forward too many, and forgets it
            self.chosen(new_tokens[:, -1])
        if len(self.steps) != new_tokens.shape[1]:
            return None
        valid = torch.arange(new_tokens.shape[1], device=ends.device) < ends[:, None]
        grid = TokenRecord(*(torch.stack(values, -1) for values in zip(*self.steps, strict=True)))
        return to_scores(TokenRecord(*(values[..., valid] for values in grid)), valid, self.spread)


class WatchedCriteria(StoppingCriteriaList):
    """Stopping criteria that tell a trace when rows stop: at an end token, a stop string, whatever was given."""

    def __init__(self, criteria: Iterable[Any], trace: GenerationTrace) -> None:
        super().__init__(criteria)
        self.trace = trace

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        stopped: Tensor = super().__call__(input_ids, scores, **kwargs)
        self.trace.judged(stopped)
        return stopped


class TraceStreamer(BaseStreamer):
    """A streamer of ``generate`` that sees tokens together with their numbers, as soon as they are drawn.

    Subclasses define ``on_step`` and, if they like, ``end``. One instance serves one call.
    """

    def __init__(self) -> None:
        self._trace: GenerationTrace | None = None
        self._num_steps = -1  # generate puts the prompt first

    def watch(self, trace: GenerationTrace) -> None:
        """Called by ``generate``.

        Raises:
            ValueError: where it was called before.
        """
        if self._trace is not None:
            raise ValueError(f"{type(self).__name__} serves one call: make another for the next")
        self._trace = trace

    def put(self, value: Tensor) -> None:
        if self._trace is None:
            raise ValueError(f"{type(self).__name__} streams from a Bayesian model's generate only")
        if self._num_steps >= 0:
            self.on_step(value, self._trace.step(self._num_steps, value))
        self._num_steps += 1

    def on_step(self, tokens: Tensor, record: TokenRecord) -> None:
        """Tokens [rows] that were drawn, and their record."""
        raise AssertionError("a TraceStreamer defines on_step")

    def end(self) -> None:
        """There are no more tokens."""


def join(records: list[TokenRecord]) -> TokenRecord:
    """Records of consecutive tokens as one."""
    return TokenRecord(*(torch.cat(values, -1) for values in zip(*records, strict=True)))


def refuse_unsupported(kwargs: dict[str, Any], default: GenerationConfig, prompt: Tensor | None = None) -> None:
    """Raise for ways of generating whose caches or loops know nothing of members, and where nothing is to continue.

    Args:
        kwargs: of generate.
        default: the model's own configuration, which holds where the call says nothing.
        prompt: [rows, T], if there is one.
    """
    if isinstance(prompt, Tensor) and prompt.shape[-1:] == (0,):
        raise ValueError(
            f"generate continues prompts of one token or more, got {list(prompt.shape)}: leave input_ids out to begin "
            "with the bos token"
        )
    config = kwargs.get("generation_config")

    def setting(name: str) -> Any:
        values = (kwargs.get(name), getattr(config, name, None), getattr(default, name, None))
        return next((value for value in values if value is not None), None)

    for name, reason in _REFUSED.items():
        value = setting(name)
        if isinstance(value, (Tensor, nn.Module)) or value not in (None, False, _NEUTRAL.get(name)):
            refuse(f"{name}={type(value).__name__ if isinstance(value, (Tensor, nn.Module)) else repr(value)}", reason)
    if (beams := setting("num_beams") or 1) > 1:
        if isinstance(kwargs.get("streamer"), TraceStreamer):
            refuse(f"num_beams={beams} of a stream", "beams are chosen among when all of them have ended")
        mask = kwargs.get("attention_mask")
        if kwargs.get("position_ids") is not None:
            refuse(f"num_beams={beams}, position_ids", _READ_AGAIN)
        if mask is not None and isinstance(prompt, Tensor) and mask.shape[-1] != prompt.shape[-1]:
            refuse(f"num_beams={beams}, attention_mask of {mask.shape[-1]} positions", _READ_AGAIN)
    implementation = setting("cache_implementation")
    if implementation not in (None, *_CACHES):
        refuse(f"cache_implementation={implementation!r}", _CACHE)
    cache = kwargs.get("past_key_values")
    if cache is not None and (type(cache) not in (DynamicCache, StaticCache) or cache.offloading):
        offloaded = " that is offloaded" if type(cache) in (DynamicCache, StaticCache) else ""
        refuse(f"past_key_values={type(cache).__name__}{offloaded}", _CACHE)
    if cache is not None and setting("use_cache") is False:
        refuse(
            f"past_key_values={type(cache).__name__}, use_cache=False",
            "every token would put the whole text into the cache once more",
        )


def refuse(asked: str, reason: str) -> None:
    """Raise for something asked of generate."""
    raise ValueError(f"generate({asked}) is not supported for an ensemble: {reason}. {_SUPPORTED}")
