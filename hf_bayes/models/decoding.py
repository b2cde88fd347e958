"""Text from the mixture: ``generate`` with the uncertainty of every token, and scores of given text."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, GenerationMixin, StoppingCriteriaList

from hf_bayes.core.layout import Layout
from hf_bayes.members.cache import reorder_cache, require_rows
from hf_bayes.models.base import predicts
from hf_bayes.models.input_check import require_ids
from hf_bayes.models.linearised_lm import LinearisedCausalLM
from hf_bayes.models.token_uncertainty import (
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
from hf_bayes.posteriors.posterior import Posterior


class Decoding(LinearisedCausalLM, GenerationMixin):
    """Members that write and score text together; their mixture's ``forward`` is the task's."""

    _trace: GenerationTrace | None = None
    """Of the ``generate`` that runs."""

    def __init__(self, model: nn.Module, layout: Layout, theta: Tensor, *, trunk: bool = True) -> None:
        super().__init__(model, layout, theta, trunk=trunk)
        self.generation_config = self.core.generation_config

    def use_settings_of(self, posterior: Posterior) -> None:
        """Generate as the model did that was saved: its generation config goes before the base model's."""
        super().use_settings_of(posterior)
        fields = posterior.sidecars.generation_config
        if fields is not None:
            self.generation_config = GenerationConfig.from_dict(fields)

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return self.core.prepare_inputs_for_generation(*args, **kwargs)

    def _reorder_cache(self, past_key_values: Any, beam_idx: Tensor) -> Any:
        """generate's own hook: beams permute sequences, and a layer holds B or M * B rows of them."""
        return reorder_cache(past_key_values, beam_idx, self._num_cached, self.members.num_trunk_blocks)

    def _prepare_generated_length(self, *args: Any, **kwargs: Any) -> Any:
        """Check generate's own count of new tokens, which is known here, against the model's context."""
        config = super()._prepare_generated_length(*args, **kwargs)
        if self._trace is not None and (mask := self._trace.prompt_mask) is not None:
            self.check_inputs.check_generation(mask, config.max_length - kwargs["input_ids_length"])
        return config

    @property
    def _num_cached(self) -> int:
        """Members whose keys and values are kept apart, in layers past the trunk."""
        return 1 if self.head.alike else self.num_members

    def _prepare_cache_for_generation(
        self, generation_config: GenerationConfig, model_kwargs: dict[str, Any], mode: Any, batch_size: int, *args: Any
    ) -> Any:
        """generate's own hook, when the mask is known and rows are repeated for beams and samples.

        A cache of the caller's own holds the rows that are to come, or none yet.
        """
        repeats = max(generation_config.num_beams, generation_config.num_return_sequences)
        if (mask := model_kwargs.get("attention_mask")) is not None:
            _refuse_padding_at_the_end(mask[::repeats])
        if (cache := model_kwargs.get("past_key_values")) is not None:
            require_rows(cache, batch_size * repeats, self._num_cached, self.members.num_trunk_blocks)
        return super()._prepare_cache_for_generation(generation_config, model_kwargs, mode, batch_size, *args)

    @torch.no_grad()
    @predicts
    def generate(
        self, inputs: Tensor | None = None, generation_config: GenerationConfig | None = None, **kwargs: Any
    ) -> Any:
        """transformers' ``generate``, unchanged, from the mixture.

        With ``return_dict_in_generate=True`` the output has six more fields (``generation.Scores``): ``total``,
        ``aleatoric``, ``epistemic``, ``logprobs`` [rows, new tokens], NaN after the end of a row, and
        ``sequence_logprob``, ``sequence_logprob_tokenwise`` [rows]; all of the raw mixture, before logits processors.
        A linearised model reads the whole text anew for every token, and has no cache.

        Raises:
            ValueError: for assisted decoding, decoding loops from elsewhere, caches of other kinds and what else
                docs/models.md lists, for prompts that have no token or end in padding or that ``InputCheck`` refuses,
                for texts that would not fit the model's table of positions, and for a linearised model whose link has a
                closed form.
        """
        prompt = inputs if inputs is not None else kwargs.get("input_ids")
        kwargs["generation_config"] = generation_config
        kwargs.pop("logits_to_keep", None)  # a token is drawn from the last position's, and the others are no record's
        if kwargs.get("use_cache", True) is None:  # it would put the whole text into the cache anew
            del kwargs["use_cache"]
        refuse_unsupported(kwargs, self.generation_config, prompt)
        self._check_prompt(prompt, kwargs)
        self._refuse_closed("generate")
        if self._linearised is not None:  # a cache would have to hold derivatives
            kwargs["use_cache"] = False
        self._trace = trace = GenerationTrace(self.spread)
        trace.prompt_mask = kwargs.get("attention_mask")
        self.spread.agree_on_randomness()
        if isinstance(streamer := kwargs.get("streamer"), TraceStreamer):
            streamer.watch(trace)
        try:
            output = super().generate(inputs, **kwargs)
        finally:
            self._trace = None
        if isinstance(output, Tensor):
            return output
        if prompt is None:
            prompt = output.sequences[:, :1]  # nothing was given: generate began with the bos token
        new = output.sequences[:, prompt.shape[1] :]
        # beams permute rows between steps: there, read the finished sequences once more
        beams = output.get("beam_indices")
        ends = trace.lengths if beams is None else (beams >= 0).sum(1)
        scores = trace.scores(new, ends) if beams is None else None
        if scores is None:
            beside = self._beside_sequences(kwargs | {"input_ids": prompt}, output.sequences)
            scores = self._score_generated(output.sequences, prompt, ends, trace.prompt_mask, beside)
        for name, value in scores._asdict().items():
            output[name] = value
        return output

    def _check_prompt(self, prompt: Any, kwargs: dict[str, Any]) -> None:
        """Raise for a prompt that ``InputCheck`` refuses; where a cache holds its beginning, the mask is longer."""
        mask, cached = kwargs.get("attention_mask"), kwargs.get("past_key_values") is not None
        self.check_inputs({"input_ids": prompt, "attention_mask": None if cached else mask})

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """transformers' way into ``generate_batch`` and its kin, whose paged cache holds tokens of many rows in one."""
        refuse("continuous batching", "its paged cache deals one row of tokens to all sequences")

    @torch.no_grad()
    @predicts
    def score(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, *, first: int = 1, **inputs: Any
    ) -> Scores:
        """What the posterior says of given text, teacher-forced.

        Args:
            input_ids: [B, T].
            attention_mask: [B, T], 0 at padding on either side.
            first: the first position that is scored; the tokens before it are context.
            inputs: what else the wrapped model takes, such as the images of these texts.
        Returns:
            Fields of [B, T - first] (NaN where a token or the one before it is padding) and [B].
        Raises:
            ValueError: for ids or a mask of another shape, for a first position that nothing precedes, and for a
                linearised model whose link has a closed form.
        """
        self._refuse_closed("score")
        if not isinstance(input_ids, Tensor):
            require_ids(input_ids)
        if input_ids.ndim != 2 or not 1 <= first <= input_ids.shape[1]:
            raise ValueError(
                f"score needs input_ids [B, T] and 1 <= first <= T, got {list(input_ids.shape)} and first={first}: a "
                "text is a row, and of its first token a causal model says nothing"
            )
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        if mask.shape != input_ids.shape:
            raise ValueError(
                f"score needs an attention_mask of the shape of input_ids, {list(input_ids.shape)}, "
                f"got {list(mask.shape)}"
            )
        self.check_inputs({"input_ids": input_ids, "attention_mask": mask})
        slices = self._row_slices({"input_ids": input_ids, "attention_mask": mask, **inputs})
        return Scores(*map(torch.cat, zip(*(self._score_rows(**rows, first=first) for rows in slices), strict=True)))

    def _score_rows(self, input_ids: Tensor, attention_mask: Tensor, first: int, **others: Any) -> Scores:
        mask = attention_mask
        rows, length = input_ids.shape
        inputs = {"input_ids": input_ids, "attention_mask": mask, **others, "use_cache": False}
        valid = (mask[:, first:] * mask[:, first - 1 : -1]).bool()
        flat = torch.arange(rows * length, device=mask.device).view(rows, length)[:, first - 1 : -1][valid]
        pieces = []
        with self._tangents():
            hidden, output, _ = self._hidden(self.numbered(inputs), None)
            for index, logits in self._logits(hidden, output, rows, flat):
                pieces.append(record(self.spread.predict(logits), logits, input_ids.flatten()[index + 1]))
        return to_scores(join(pieces), valid, self.spread)

    def _beside_sequences(self, kwargs: dict[str, Any], sequences: Tensor) -> dict[str, Any]:
        """What ``score`` takes beside ``sequences`` [rows, T], of the arguments of the ``generate`` that wrote them."""
        return {}

    def _score_generated(
        self, sequences: Tensor, prompt: Tensor, ends: Tensor, mask: Tensor | None, beside: dict[str, Any]
    ) -> Scores:
        start = prompt.shape[1]
        given = torch.ones_like(prompt) if mask is None else mask
        given = given.repeat_interleave(len(sequences) // len(given), 0)
        step = torch.arange(sequences.shape[1] - start, device=sequences.device)
        # shorter beams are filled up, with -1 where transformers knows neither an end nor a padding token but 0
        tokens = sequences.clamp_min(0)
        return self.score(tokens, torch.cat([given, (step < ends[:, None]).to(given.dtype)], 1), first=start, **beside)

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


def _refuse_padding_at_the_end(mask: Tensor) -> None:
    """Raise where the next token would be read off a padding token; transformers warns."""
    padded = (mask[:, -1] == 0).nonzero()[:, 0].tolist()
    if padded:
        raise ValueError(
            f"{len(padded)} of {len(mask)} prompts end in padding, first row {padded[0]}: what comes next would follow "
            "from the padding, and so would its uncertainty. Pad on the left: tokenizer.padding_side='left'"
        )
