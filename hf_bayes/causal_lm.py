"""M causal language models as one: the mixture's logits, generation with uncertainty, scores of given text."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache, GenerationMixin, PreTrainedModel, StoppingCriteriaList
from transformers.modeling_outputs import CausalLMOutputWithPast

from hf_bayes.batches import next_tokens
from hf_bayes.generation import (
    GenerationTrace,
    Scores,
    TraceStreamer,
    WatchedCriteria,
    join,
    record,
    refuse,
    refuse_unsupported,
    to_scores,
)
from hf_bayes.likelihood import Categorical
from hf_bayes.members.cache import empty_like, leave_room, merge_caches, mergeable, reorder_cache
from hf_bayes.members.head import ChunkedHead
from hf_bayes.members.trunk import num_positions_of, num_rows_of
from hf_bayes.model import BayesianModel, MemberLogLik, predicts, term_statistics
from hf_bayes.subspace import Layout
from hf_bayes.uncertainty import Prediction, Uncertainty

_ANSWER_NO_CACHE = ("recurrent_gemma",)
"""Model types that take ``past_key_values`` and keep what counts in their layers."""

HIDDEN_BYTES = 16 << 20
"""Hidden states of all members that are held in any case, however small the model: shorter passes would cost time."""


@dataclass
class BayesianCausalLMOutput(CausalLMOutputWithPast):
    """``logits`` [B, T, V] are the log of the mixture; uncertainties [B, T] in nats."""

    total: Tensor | None = None
    aleatoric: Tensor | None = None
    epistemic: Tensor | None = None


class BayesianModelForCausalLM(BayesianModel, GenerationMixin):
    """M causal language models as one: ``generate`` samples from the posterior predictive, token by token."""

    task = "causal_lm"
    shifts_labels = True
    auto_class = AutoModelForCausalLM

    def __init__(self, model: nn.Module, layout: Layout, theta: Tensor, *, trunk: bool = True) -> None:
        core = model.get_base_model() if isinstance(model, PeftModel) else model
        _refuse_hidden_state(core)
        super().__init__(model, layout, theta, trunk=trunk)
        try:
            self.head = ChunkedHead(self.members)
        except ValueError:
            self.detach()
            raise
        self.generation_config = self.core.generation_config
        self.likelihood = Categorical()
        self._trace: GenerationTrace | None = None

    def linearise(self, link: str | None = "monte_carlo") -> NoReturn:
        """Refused: a classifier's way to predict (``BayesianClassifier.linearise``).

        Raises:
            ValueError: always.
        """
        raise ValueError(
            f"linearised predictions take a Jacobian and a covariance of all outputs, at every position "
            f"{self.config.get_text_config().vocab_size} words: a language model predicts by members drawn from its "
            "posterior (from_pretrained(..., members=M))"
        )

    @classmethod
    def wraps(cls, core: nn.Module) -> bool:
        """Whatever generates."""
        return isinstance(core, PreTrainedModel) and core.can_generate()

    def log_lik(self, theta: Tensor, inputs: dict[str, Any], *, folded: bool) -> MemberLogLik:
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
            log_lik = self.head.log_lik(hidden[:, wanted], output, labels, self.likelihood.log_prob)
            self.members.check_all_read()
        return MemberLogLik(-log_lik, self.likelihood.is_term(labels).sum(1))

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
            ValueError: for outputs that have no meaning for a mixture (hidden states, attentions).
        """
        if kwargs.pop("output_hidden_states", None) or kwargs.pop("output_attentions", None):
            raise ValueError("hidden states and attentions differ from member to member: ask members of `model.core`")
        kwargs.pop("return_dict", None)
        kwargs.pop("num_items_in_batch", None)
        named = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids,
                 "inputs_embeds": inputs_embeds, "use_cache": use_cache}  # fmt: skip
        inputs = {**{k: v for k, v in named.items() if v is not None}, **kwargs}
        if theta is not None:
            return self.log_lik(theta, {**inputs, "labels": labels}, folded=folded)
        if self._trace is not None and input_ids is not None:
            self._trace.chosen(input_ids[:, -1])
        return self._answer(inputs, past_key_values, labels, logits_to_keep)

    @predicts
    def _answer(
        self, inputs: dict[str, Any], cache: Any, labels: Tensor | None, logits_to_keep: int | Tensor
    ) -> BayesianCausalLMOutput:
        """``forward`` of the mixture."""
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
        prediction = self._predict(hidden, output, rows, positions)
        logits = prediction.log_probs.view(rows, len(steps), -1)
        loss = None
        if labels is not None:
            targets = next_tokens(labels, inputs.get("attention_mask"))[:, steps]
            terms = self.likelihood.is_term(targets)
            loss = -self.likelihood.log_prob(logits, targets).sum() / terms.sum().clamp_min(1)
        shape = (rows, len(steps))
        return BayesianCausalLMOutput(
            loss=loss,
            logits=logits,
            past_key_values=cache,
            **{name: value.view(shape) for name, value in prediction.uncertainty._asdict().items()},
        )

    @property
    def num_root_columns(self) -> int | None:
        head = self.core.get_output_embeddings()
        return None if head is None else self.likelihood.num_root_columns(head.weight.shape[0])

    @predicts
    def evaluate_batch(
        self, inputs: dict[str, Any], *, keep_logits: bool = False
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        found = [self._evaluate_rows(rows, keep_logits) for rows in self._row_slices(inputs)]
        statistics = {name: torch.cat([piece[name] for piece, _ in found]) for name in found[0][0]}
        kept = [logits for _, logits in found if logits is not None]
        return statistics, torch.cat(kept) if kept else None

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

    def numbered(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """``inputs`` with positions that count from a row's first token, as generate numbers left-padded rows."""
        mask = inputs.get("attention_mask")
        if mask is None or mask.ndim != 2 or inputs.get("position_ids") is not None:
            return inputs
        if not bool((mask[:, :-1] < mask[:, 1:]).any()):  # no padding before a token
            return inputs
        if "position_ids" not in inspect.signature(self.core.forward).parameters:
            return inputs
        return {**inputs, "position_ids": (mask.cumsum(1) - 1).clamp_min(0)}

    def _row_slices(self, inputs: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """A batch in pieces of whole rows, so that memory grows with its rows no more than with its members.

        Hidden states of all members take at most a quarter of the model's memory at once (or those of one row, or
        ``HIDDEN_BYTES``): with the copy that joins the passes of members, half of it.
        """
        rows, members = num_rows_of(inputs), 1 if self.head.alike else self.num_members
        width = self.config.get_text_config(decoder=True).hidden_size * self.dtype.itemsize
        budget = max(HIDDEN_BYTES, sum(weight.nbytes for weight in self.core.parameters()) // 4)
        size = max(1, budget // (members * num_positions_of(inputs) * width))
        for start in range(0, rows, size):
            yield {
                name: value[start : start + size] if isinstance(value, Tensor) and len(value) == rows else value
                for name, value in inputs.items()
            }

    def _evaluate_rows(self, inputs: dict[str, Any], keep_logits: bool) -> tuple[dict[str, Tensor], Tensor | None]:
        inputs = {**inputs, "use_cache": False}
        targets = next_tokens(inputs.pop("labels"), inputs.get("attention_mask"))
        hidden, output, _ = self._hidden(self.numbered(inputs), None)
        rows, flat = targets.shape[0], targets.flatten()
        wanted = None if keep_logits else self.likelihood.is_term(flat).nonzero()[:, 0]
        pieces, logits_kept = [], []
        with self.members.bind(self.current):
            for index, logits in self.head.stream(hidden, output, rows, wanted):
                prediction = self.spread.predict(logits)
                if keep_logits:
                    logits_kept.append(prediction.log_probs)
                pieces.append(term_statistics(prediction, logits, flat[index], self.spread))
        statistics = {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}
        return statistics, torch.cat(logits_kept).view(*targets.shape, -1) if keep_logits else None

    def _hidden(self, inputs: dict[str, Any], cache: Any) -> tuple[Tensor, Any, Any]:
        """Hidden states of all members ([B, T, h] if alike), the backbone's last output, and the cache."""
        # where only the head is random, one member's hidden states are those of all
        passes = [self.current[:1]] if self.head.alike else self._passes(inputs)
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

    def _predict(self, hidden: Tensor, output: Any, rows: int, positions: Tensor) -> Prediction:
        """The mixture at flat positions: log_probs [n, V] and uncertainties [n]."""
        pieces = []
        with self.members.bind(self.current):
            for _, logits in self.head.stream(hidden, output, rows, positions):
                pieces.append(self.spread.predict(logits))
                if self._trace is not None:
                    self._trace.observe(pieces[-1], logits)
        if len(pieces) == 1:  # every step of decoding
            return pieces[0]
        log_probs = torch.cat([piece.log_probs for piece in pieces])
        parts = zip(*(piece.uncertainty for piece in pieces), strict=True)
        return Prediction(log_probs, Uncertainty(*(torch.cat(part) for part in parts)))

    # -- generation ---------------------------------------------------------------------------------------------

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return self.core.prepare_inputs_for_generation(*args, **kwargs)

    def _reorder_cache(self, past_key_values: Any, beam_idx: Tensor) -> Any:
        """generate's own hook: beams permute sequences, and a layer holds B or M * B rows of them."""
        members = 1 if self.head.alike else self.num_members
        return reorder_cache(past_key_values, beam_idx, members, self.members.num_trunk_blocks)

    @torch.no_grad()
    @predicts
    def generate(self, inputs: Tensor | None = None, **kwargs: Any) -> Any:
        """transformers' ``generate``, unchanged, from the mixture.

        With ``return_dict_in_generate=True`` the output has six more fields (``generation.Scores``): ``total``,
        ``aleatoric``, ``epistemic``, ``logprobs`` [rows, new tokens], NaN after the end of a row, and
        ``sequence_logprob``, ``sequence_logprob_tokenwise`` [rows]; all of the raw mixture, before logits processors.

        Raises:
            ValueError: for assisted decoding, decoding loops from elsewhere and caches of other kinds (docs/models.md).
        """
        refuse_unsupported(kwargs, self.generation_config)
        self._trace = trace = GenerationTrace(self.spread)
        self.spread.agree_on_randomness()
        if isinstance(streamer := kwargs.get("streamer"), TraceStreamer):
            streamer.watch(trace)
        try:
            output = super().generate(inputs, **kwargs)
        finally:
            self._trace = None
        if isinstance(output, Tensor):
            return output
        prompt = inputs if inputs is not None else kwargs.get("input_ids")
        if prompt is None:
            prompt = output.sequences[:, :1]  # nothing was given: generate began with the bos token
        new = output.sequences[:, prompt.shape[1] :]
        # beams permute rows between steps: there, read the finished sequences once more
        beams = output.get("beam_indices")
        ends = trace.lengths if beams is None else (beams >= 0).sum(1)
        scores = trace.scores(new, ends) if beams is None else None
        if scores is None:
            mask = trace.prompt_mask if kwargs.get("attention_mask") is None else kwargs["attention_mask"]
            scores = self._score_generated(output.sequences, prompt, ends, mask)
        for name, value in scores._asdict().items():
            output[name] = value
        return output

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """transformers' way into ``generate_batch`` and its kin, whose paged cache holds tokens of many rows in one."""
        refuse("continuous batching", "its paged cache deals one row of tokens to all sequences")

    @torch.no_grad()
    @predicts
    def score(self, input_ids: Tensor, attention_mask: Tensor | None = None, *, first: int = 1) -> Scores:
        """What the posterior says of given text, teacher-forced.

        Args:
            input_ids: [B, T].
            attention_mask: [B, T], 0 at padding on either side.
            first: the first position that is scored; the tokens before it are context.
        Returns:
            Fields of [B, T - first] (NaN where a token or the one before it is padding) and [B].
        """
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        slices = self._row_slices({"input_ids": input_ids, "attention_mask": mask})
        return Scores(*map(torch.cat, zip(*(self._score_rows(**rows, first=first) for rows in slices), strict=True)))

    def _score_rows(self, input_ids: Tensor, attention_mask: Tensor, first: int) -> Scores:
        mask = attention_mask
        rows, length = input_ids.shape
        inputs = {"input_ids": input_ids, "attention_mask": mask, "use_cache": False}
        hidden, output, _ = self._hidden(self.numbered(inputs), None)
        valid = (mask[:, first:] * mask[:, first - 1 : -1]).bool()
        flat = torch.arange(rows * length, device=hidden.device).view(rows, length)[:, first - 1 : -1][valid]
        pieces = []
        with self.members.bind(self.current):
            for index, logits in self.head.stream(hidden, output, rows, flat):
                pieces.append(record(self.spread.predict(logits), logits, input_ids.flatten()[index + 1]))
        return to_scores(join(pieces), valid, self.spread)

    def _valid_auto_compile_criteria(self, *args: Any, **kwargs: Any) -> bool:
        """generate's own hook: on GPUs it compiles the forward for static caches, which ours does not survive."""
        return False

    def _prepare_attention_mask_for_generation(self, *args: Any, **kwargs: Any) -> Tensor:
        """generate's own hook: called where no mask is given, to tell padding by its token."""
        mask = super()._prepare_attention_mask_for_generation(*args, **kwargs)
        if self._trace is not None:
            self._trace.prompt_mask = mask
        return mask

    def _get_stopping_criteria(self, *args: Any, **kwargs: Any) -> StoppingCriteriaList:
        """generate's own hook: which row stops when is decided there and told to nobody else."""
        criteria = super()._get_stopping_criteria(*args, **kwargs)
        return criteria if self._trace is None else WatchedCriteria(criteria, self._trace)

    def _score_generated(self, sequences: Tensor, prompt: Tensor, ends: Tensor, mask: Tensor | None) -> Scores:
        start = prompt.shape[1]
        given = (torch.ones_like(prompt) if mask is None else mask).repeat_interleave(len(sequences) // len(prompt), 0)
        step = torch.arange(sequences.shape[1] - start, device=sequences.device)
        return self.score(sequences, torch.cat([given, (step < ends[:, None]).to(given.dtype)], 1), first=start)


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


def _kept(logits_to_keep: int | Tensor, length: int, device: torch.device) -> Tensor:
    steps = torch.arange(length, device=device)
    if isinstance(logits_to_keep, Tensor):
        return logits_to_keep.to(device)
    return steps[-logits_to_keep:] if logits_to_keep else steps
