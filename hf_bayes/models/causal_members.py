"""M causal language models side by side: hidden states, logits of a few positions at a time, log-likelihoods."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from hf_bayes.core.layout import Layout
from hf_bayes.members.cache import empty_like, leave_room, merge_caches, mergeable
from hf_bayes.members.head import ChunkedHead
from hf_bayes.members.trunk import num_positions_of, num_rows_of
from hf_bayes.models.base import BayesianModel, MemberLogLik, predicts
from hf_bayes.uncertainty.likelihoods import Categorical, next_tokens

_ANSWER_NO_CACHE = ("recurrent_gemma",)
"""Model types that take ``past_key_values`` and keep what counts in their layers."""

HIDDEN_BYTES = 16 << 20
"""Hidden states of all members that are held in any case, however small the model: shorter passes would cost time."""


class CausalMembers(BayesianModel):
    """Members of a causal language model, before anything is predicted by them.

    Attributes:
        head: runs the backbone once and the head on chunks of positions.
    """

    task = "causal_lm"
    shifts_labels = True
    auto_class = AutoModelForCausalLM

    def __init__(self, model: nn.Module, layout: Layout, theta: Tensor, *, trunk: bool = True) -> None:
        core = model.get_base_model() if isinstance(model, PeftModel) else model
        _refuse_bidirectional(core)
        _refuse_hidden_state(core)
        super().__init__(model, layout, theta, trunk=trunk)
        try:
            self.head = ChunkedHead(self.members)
        except ValueError:
            self.detach()
            raise
        self.likelihood = Categorical()

    @property
    def num_outputs(self) -> int:
        return self.config.get_text_config().vocab_size

    @property
    def num_root_columns(self) -> int | None:
        head = self.core.get_output_embeddings()
        return None if head is None else self.likelihood.num_root_columns(head.weight.shape[0])

    def log_lik(
        self, theta: Tensor, inputs: dict[str, Any], *, folded: bool, weights: Tensor | None = None
    ) -> MemberLogLik:
        inputs = {**inputs, "use_cache": False}
        labels = next_tokens(inputs.pop("labels"), inputs.get("attention_mask"))
        inputs.pop("logits_to_keep", None)
        inputs = self.numbered(inputs)
        members = len(theta)
        with self.members.bind(theta):
            hidden, output = self.head.hidden(inputs, folded=folded)
            rows = labels.shape[0] // members if folded else labels.shape[0]
            hidden = self.head.per_member(hidden, rows)
            labels = labels.reshape(members if folded else 1, -1)
            wanted = self.likelihood.is_term(labels).any(0).nonzero()[:, 0]
            labels = labels[:, wanted].expand(members, -1)
            places = torch.arange(labels.shape[1], device=labels.device).expand(members, -1)

            def log_prob(logits: Tensor, places: Tensor) -> Tensor:
                """Of some terms, by their places: the head runs on a few at a time."""
                found = self.likelihood.log_prob(logits, labels.gather(1, places))
                return found if weights is None else found * weights.gather(1, places)

            log_lik = self.head.log_lik(hidden[:, wanted], output, places, log_prob)
            self.members.check_all_read()
        return MemberLogLik(-log_lik, self.likelihood.is_term(labels).sum(1))

    @predicts
    def each_term(self, inputs: dict[str, Any], function: Callable[[Tensor, Tensor], Any]) -> list[Any]:
        found = []
        for rows in self._row_slices(inputs):
            rows = {**rows, "use_cache": False}
            targets = next_tokens(rows.pop("labels"), rows.get("attention_mask"))
            hidden, output, _ = self._hidden(self.numbered(rows), None)
            flat = targets.flatten()
            wanted = self.likelihood.is_term(flat).nonzero()[:, 0]
            with self.members.bind(self.current):
                for index, logits in self.head.stream(hidden, output, len(targets), wanted):
                    found.append(function(logits, flat[index]))
        return found

    def refuse_unknown_inputs(self, inputs: dict[str, Any]) -> None:
        """Raise for inputs whose entries cannot be assigned to rows."""

    def numbered(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """``inputs`` with positions that count from a row's first token, as generate numbers left-padded rows."""
        mask = inputs.get("attention_mask")
        if mask is None or mask.ndim != 2 or inputs.get("position_ids") is not None:
            return inputs
        if not bool((mask[:, :-1] < mask[:, 1:]).any()):  # no padding before a token
            return inputs
        if "position_ids" not in inspect.signature(self.core.forward).parameters:
            return inputs
        return {**inputs, "position_ids": (mask.long().cumsum(1) - 1).clamp_min(0)}

    @property
    def _num_held(self) -> int:
        """Hidden states of a row that are held at once."""
        return 1 if self.head.alike else self.num_members

    def _row_slices(self, inputs: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """A batch in pieces of whole rows, so that memory grows with its rows no more than with its members.

        Hidden states of all members take at most a quarter of the model's memory at once (or those of one row, or
        ``HIDDEN_BYTES``): with the copy that joins the passes of members, half of it.
        """
        rows = num_rows_of(inputs)
        width = self.config.get_text_config(decoder=True).hidden_size * self.dtype.itemsize
        budget = max(HIDDEN_BYTES, sum(weight.nbytes for weight in self.core.parameters()) // 4)
        size = max(1, budget // (self._num_held * num_positions_of(inputs) * width))
        for start in range(0, rows, size):
            yield inputs if size >= rows else self.take_rows(inputs, torch.arange(start, min(start + size, rows)))

    def _hidden(self, inputs: dict[str, Any], cache: Any) -> tuple[Tensor, Any, Any]:
        """Hidden states of all members ([B, T, h] if alike), the backbone's last output, and the cache."""
        # where only the head is random, one member's hidden states are those of all
        passes = [self.current[:1]] if self.head.alike else self.passes(inputs)
        if len(passes) > 1 and cache is None:
            wanted = inputs.get("use_cache")  # a cache that nobody asked for would hold all members
            cache = DynamicCache(config=self.config.get_text_config(decoder=True)) if wanted else None
            inputs = {**inputs, "use_cache": bool(wanted)}
        if len(passes) > 1 and cache is not None and not mergeable(cache):
            passes = [self.current]  # members of one pass share one cache; not every kind can be pieced together
        pieces, outputs = [], []
        with self.members.trunk.once() if len(passes) > 1 else nullcontext():
            for theta in passes:
                own = {} if cache is None else {"past_key_values": cache if len(passes) == 1 else empty_like(cache)}
                with self.members.bind(theta):
                    hidden, output = self.head.hidden({**inputs, **own})
                pieces.append(hidden)
                outputs.append(output)
        if cache is None and len(passes) == 1:
            cache = outputs[0].past_key_values
        elif len(passes) > 1:
            caches = [output.past_key_values for output in outputs]
            cache = None if cache is None else merge_caches(cache, caches, self.members.num_trunk_blocks)
        return torch.cat(pieces) if len(pieces) > 1 else pieces[0], outputs[-1], leave_room(cache)

    def _logits(self, hidden: Tensor, output: Any, rows: int, positions: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Chunk by chunk of flat positions: which, and the members' logits [M, n, V]."""
        with self.members.bind(self.current):
            yield from self.head.stream(hidden, output, rows, positions)


def _refuse_bidirectional(core: nn.Module) -> None:
    """Raise for an encoder with the head of a language model, whose positions see the tokens that they predict."""
    config: Any = getattr(core, "config", None)
    if getattr(config, "is_decoder", True) is False and not config.model_type.startswith("gpt_neox"):
        raise ValueError(
            f"{type(core).__name__} has is_decoder=False, so that each position sees the tokens it predicts: as a "
            "causal language model load it with is_decoder=True"
        )


def _refuse_hidden_state(core: nn.Module) -> None:
    """Raise for models whose state between tokens is not in a cache that can be dealt to members."""
    if not isinstance(core, PreTrainedModel):
        return
    if "past_key_values" not in inspect.signature(core.forward).parameters:
        what = "takes no past_key_values"
    elif core.config.model_type in _ANSWER_NO_CACHE:
        what = "answers no past_key_values"
    else:
        return
    raise ValueError(
        f"{type(core).__name__} {what}: models that keep their state elsewhere (Mamba's cache_params, RecurrentGemma's "
        "own layers) or nowhere are not supported as causal language models. Take one with a cache (docs/models.md)"
    )
