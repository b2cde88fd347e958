"""Text from the mixture: ``generate`` with the uncertainty of every token, and scores of given text."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from hf_bayes.members.cache import reorder_cache, require_cache_rows
from hf_bayes.members.compat.transformers import cache_of, with_cache_named
from hf_bayes.members.member_sums import LocalMembers
from hf_bayes.models.input_check import SHORTEN, InputCheck, require_ids
from hf_bayes.models.language.causal_members import CausalMembers
from hf_bayes.models.language.generation_refusals import refuse_static_cache, refuse_unsupported
from hf_bayes.models.language.logit_level import at_level_of_logits
from hf_bayes.models.language.token_uncertainty import (
    GenerationTrace,
    Scores,
    TraceStreamer,
    WatchedCriteria,
    join,
    record,
    to_scores,
)
from hf_bayes.models.prediction.tokens import TokenPredictor
from hf_bayes.models.predictors import Predictive


class ModelOfText(Protocol):
    """The part of a language model that decoding reads."""

    predictor: TokenPredictor
    check_inputs: InputCheck
    generation_config: Any

    @property
    def num_members(self) -> int: ...

    @property
    def member_group(self) -> LocalMembers: ...

    def score(self, input_ids: Tensor, attention_mask: Tensor, *, first: int, **inputs: Any) -> Scores: ...

    def predictions(self, inputs: dict[str, Any], positions: Tensor) -> Generator[tuple[Tensor, Predictive]]: ...

    def row_slices(self, inputs: dict[str, Any]) -> Iterator[dict[str, Any]]: ...

    def inputs_beside(self, prompt: dict[str, Any], sequences: Tensor) -> dict[str, Any]: ...


class Decoding:
    """The state of ``generate`` beside the model, its checks, and its records. The model is given in each call.

    Attributes:
        trace: the record of the ``generate`` that runs, the innermost one; None outside of one.
    """

    def __init__(self, causal: CausalMembers) -> None:
        self.causal = causal
        self.trace: GenerationTrace | None = None
        self._ids_of_step: Tensor | None = None  # the input_ids of the step of generate that comes next

    # -- generate -----------------------------------------------------------------------------------------------------

    def generate(
        self, model: ModelOfText, by_host: Callable[..., Any], inputs: Tensor | None, kwargs: dict[str, Any]
    ) -> Any:
        """Generate, and add ``Scores`` to an output that is a mapping.

        Args:
            by_host: transformers' ``generate`` of the model.
            kwargs: the arguments of ``generate``.
        """
        prompt = inputs if inputs is not None else kwargs.get("input_ids")
        if self.causal.new_cache() is None:  # a cache of the model's own kind may hold states that beams do not permute
            kwargs = {**kwargs, "use_cache": False}
        kwargs = _checked(model, prompt, kwargs)
        group = model.member_group
        outer, self.trace = self.trace, GenerationTrace(group)  # a logits processor may generate, too
        trace = self.trace
        trace.prompt_mask = kwargs.get("attention_mask")
        group.agree_on_randomness()
        if isinstance(streamer := kwargs.get("streamer"), TraceStreamer):
            streamer.watch(trace)
        try:
            output = by_host(inputs, **kwargs)
        finally:
            self.trace, self._ids_of_step = outer, None
        if isinstance(output, Tensor):
            return output
        if prompt is None:
            prompt = output.sequences[:, :1]  # without a prompt generate begins with the bos token
        for name, value in _scores(model, trace, output, prompt, kwargs)._asdict().items():
            output[name] = value
        return output

    # -- during a generate ---------------------------------------------------------------------------------------------

    def expect_step(self, prepared: dict[str, Any]) -> dict[str, Any]:
        """Remember the inputs that ``generate`` has prepared for its next forward pass, and return them."""
        self._ids_of_step = None if self.trace is None else prepared.get("input_ids")
        return prepared

    def begin_step(self, ids: Tensor | None) -> GenerationTrace | None:
        """Return the trace that records the forward pass over ``ids`` if it is a step of ``generate``, and else None.

        The last token of each row is the one that the step before has chosen, and the trace notes it. Logits
        processors, stopping criteria and streamers may call the model between two steps. These passes draw no token of
        the text.
        """
        trace, is_step = self.trace, ids is not None and ids is self._ids_of_step
        if trace is None or ids is None or not is_step:
            return None
        self._ids_of_step = None
        trace.chosen(ids[:, -1])
        return trace

    def remember_mask(self, mask: Tensor) -> Tensor:
        """Record the attention mask that transformers finds for a prompt without one."""
        if self.trace is not None:
            self.trace.prompt_mask = mask
        return mask

    def check_length(self, check_inputs: InputCheck, config: GenerationConfig, prompt_length: int) -> GenerationConfig:
        """Check the number of new tokens, which is known now, against the model's context."""
        if self.trace is not None and (mask := self.trace.prompt_mask) is not None:
            check_inputs.check_generation(mask, config.max_length - prompt_length)
        return config

    def levelled(
        self, processors: LogitsProcessorList, config: GenerationConfig, temperature: float
    ) -> LogitsProcessorList:
        """Return logits processors. Penalties act on logits; with beams on log-probabilities, as in transformers."""
        if self.trace is None or config.num_beams > 1:
            return processors
        return at_level_of_logits(processors, self.trace, temperature)

    def watched(self, criteria: StoppingCriteriaList) -> StoppingCriteriaList:
        """Return stopping criteria whose decisions the trace records."""
        return criteria if self.trace is None else WatchedCriteria(criteria, self.trace)

    # -- caches --------------------------------------------------------------------------------------------------------

    def check_cache(self, num_members: int, config: GenerationConfig, kwargs: dict[str, Any], num_prompts: int) -> None:
        """Check the prompt's mask, and the rows of a cache that the caller gives.

        The mask is known and rows are repeated for beams and samples. A cache of the caller's own must hold the rows
        that follow, or none yet.
        """
        repeats = max(config.num_beams, config.num_return_sequences)
        if (mask := kwargs.get("attention_mask")) is not None:
            _refuse_padding_at_the_end(mask[::repeats])
        if (cache := cache_of(kwargs)) is not None:
            num_trunk = self.causal.members.num_trunk_blocks
            require_cache_rows(cache, num_prompts * repeats, self.causal.num_stored(num_members), num_trunk)

    def reorder(self, num_members: int, cache: Any, beam_idx: Tensor) -> Any:
        """Permute the sequences of a cache. A layer holds B or M * B rows of them."""
        num_trunk = self.causal.members.num_trunk_blocks
        return reorder_cache(cache, beam_idx, self.causal.num_stored(num_members), num_trunk)


def score(
    model: ModelOfText, input_ids: Tensor, attention_mask: Tensor | None, first: int, inputs: dict[str, Any]
) -> Scores:
    """Return the scores of given text; arguments as of ``BayesianModelForCausalLM.score``."""
    model.predictor.require_members("score")
    if not isinstance(input_ids, Tensor):
        require_ids(input_ids)
    if input_ids.ndim != 2 or not 1 <= first <= input_ids.shape[1]:
        raise ValueError(
            f"score needs input_ids [B, T] and 1 <= first <= T, got {list(input_ids.shape)} and first={first}: give "
            "one row per text; a causal model does not predict the first token"
        )
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    if mask.shape != input_ids.shape:
        raise ValueError(
            f"score needs an attention_mask of the shape of input_ids, {list(input_ids.shape)}, got {list(mask.shape)}"
        )
    model.check_inputs({"input_ids": input_ids, "attention_mask": mask})
    slices = model.row_slices({"input_ids": input_ids, "attention_mask": mask, **inputs})
    found = [_score_rows(model, **rows, first=first) for rows in slices]
    return Scores(*map(torch.cat, zip(*found, strict=True)))


def token_types_beside(prompt: dict[str, Any], sequences: Tensor) -> dict[str, Tensor]:
    """Return the ``token_type_ids`` of ``sequences`` [rows, T] if the prompt has any, by name.

    As in ``generate``, a new token has the type of the prompt's last token.
    """
    types = prompt.get("token_type_ids")
    if types is None:
        return {}
    num_new = sequences.shape[1] - types.shape[1]
    types = torch.cat([types, types[:, -1:].expand(-1, num_new)], 1)
    return {"token_type_ids": types.repeat_interleave(len(sequences) // len(types), 0)}


def _score_rows(model: ModelOfText, input_ids: Tensor, attention_mask: Tensor, first: int, **others: Any) -> Scores:
    mask = attention_mask
    rows, length = input_ids.shape
    inputs = {"input_ids": input_ids, "attention_mask": mask, **others, "use_cache": False}
    valid = (mask[:, first:] * mask[:, first - 1 : -1]).bool()
    flat = torch.arange(rows * length, device=mask.device).view(rows, length)[:, first - 1 : -1][valid]
    pieces = []
    with closing(model.predictions(inputs, flat)) as chunks:  # an error must not leave tangents behind
        for index, found in chunks:
            assert found.members is not None  # require_members refuses closed forms
            prediction, logits = found.members
            pieces.append(record(prediction, logits, input_ids.flatten()[index + 1]))
    return to_scores(join(pieces), valid, model.member_group)


def _checked(model: ModelOfText, prompt: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments for transformers' ``generate``, or raise for arguments that are not supported."""
    kwargs = with_cache_named(kwargs)
    kwargs.pop("logits_to_keep", None)  # a token is drawn at the last position, and only that one is recorded
    if kwargs.get("use_cache", True) is None:  # None would put the whole text into the cache anew
        del kwargs["use_cache"]
    refuse_unsupported(kwargs, model.generation_config, prompt)
    if model.predictor.has_uncertain_caches:
        refuse_static_cache(kwargs, model.generation_config)
    # the mask is longer than a prompt whose beginning is in a cache
    mask = None if cache_of(kwargs) is not None else kwargs.get("attention_mask")
    model.check_inputs({"input_ids": prompt, "attention_mask": mask}, advice=SHORTEN)
    model.predictor.require_members("generate")
    if not model.predictor.keeps_caches:
        kwargs["use_cache"] = False
    return kwargs


def _scores(model: ModelOfText, trace: GenerationTrace, output: Any, prompt: Tensor, kwargs: dict[str, Any]) -> Scores:
    """Return the scores of new tokens: from the trace, or for beams by reading the finished sequences again."""
    new = output.sequences[:, prompt.shape[1] :]
    beams = output.get("beam_indices")  # beams permute rows between steps
    ends = trace.lengths if beams is None else (beams >= 0).sum(1)
    scores = trace.scores(new, ends) if beams is None else None
    if scores is not None:
        return scores
    beside = model.inputs_beside(kwargs | {"input_ids": prompt}, output.sequences)
    start, sequences = prompt.shape[1], output.sequences
    given = torch.ones_like(prompt) if trace.prompt_mask is None else trace.prompt_mask
    given = given.repeat_interleave(len(sequences) // len(given), 0)
    step = torch.arange(sequences.shape[1] - start, device=sequences.device)
    # shorter beams are filled up, with -1 where transformers finds neither an end nor a padding token but 0
    tokens = sequences.clamp_min(0)
    full_mask = torch.cat([given, (step < ends[:, None]).to(given.dtype)], 1)
    if model.check_inputs.first_position > 0:  # ``generate`` of transformers counts from 0, whatever the family
        beside["position_ids"] = (full_mask.long().cumsum(1) - 1).clamp_min(0)
    return model.score(tokens, full_mask, first=start, **beside)


def _refuse_padding_at_the_end(mask: Tensor) -> None:
    """Raise if the next token would be predicted from a padding token. (transformers only warns.)"""
    padded = (mask[:, -1] == 0).nonzero()[:, 0].tolist()
    if padded:
        raise ValueError(
            f"{len(padded)} of {len(mask)} prompts end in padding, first row {padded[0]}: what comes next would follow "
            "from the padding, and so would its uncertainty. Pad on the left: tokenizer.padding_side='left'"
        )
