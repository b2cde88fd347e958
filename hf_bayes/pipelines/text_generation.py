"""Text generation whose records carry total, aleatoric and epistemic uncertainty.

A record of "bayesian-text-generation" is transformers' own, with three more keys::

    {"generated_text": ..., "tokens": [{"token", "id", "logprob", "total", "aleatoric", "epistemic"}, ...],
     "uncertainty": {"total", "aleatoric", "epistemic", "sequence_logprob", "sequence_logprob_tokenwise"},
     "num_members": M}

``num_members`` is the number of members that were averaged: epistemic uncertainty is at most its logarithm. Records of
a distilled student have no such key. Where the mixture has a temperature t other than 1, they have the key
"mixture_temperature", too, and epistemic uncertainty has no such bound.
``tokens`` are the new tokens up to the end of the row, the end token included. All numbers are floats in nats, of the
raw mixture; ``uncertainty`` holds means over the tokens and the two log-probabilities of the sequence. ``token`` is the
token's part of the text: joined, the tokens that are not special are the generated text. A character that is spread
over several tokens belongs to the token that completes it; the earlier tokens have "". Special tokens stand under their
names ("</s>"). Spaces that a tokenizer cleans up are still in ``token``.

With ``abstain`` a record has one more key, "abstained": True if the answer should be withheld. ``abstain`` is True for
the threshold that is stored with the posterior (``decide.abstention``), or an ``Abstention``.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterable, Mapping
from queue import SimpleQueue
from typing import Any, NamedTuple

from torch import Tensor
from transformers import PreTrainedTokenizerBase, TextGenerationPipeline

from hf_bayes.core.number_checks import is_count
from hf_bayes.decide.abstention import rule_for
from hf_bayes.members.compat.transformers import batch_size_of
from hf_bayes.models.base import BayesianModel
from hf_bayes.models.causal_lm import BayesianModelForCausalLM
from hf_bayes.models.language.token_uncertainty import Scores
from hf_bayes.pipelines.construction import BayesianPipeline
from hf_bayes.pipelines.prompts import answer_start, prompts_of, require_offsets
from hf_bayes.pipelines.records import Record, UncertaintyStreamer, decision, scored
from hf_bayes.posteriors.abstention import ANSWER_MEASURES, Abstention

_OWN = ("text", "text_pair", "text_target", "text_pair_target", "padding", "return_tensors",
        "return_offsets_mapping", "return_attention_mask", "return_overflowing_tokens",
        "is_split_into_words")  # fmt: skip
"""Arguments of a tokenizer that ``score`` sets itself or does not use."""


class _Abandoned(Exception):
    """The reader of the stream has stopped."""


class _Finished(NamedTuple):
    """The last entry in a stream's queue."""

    records: list[Record]


class _QueueStreamer(UncertaintyStreamer):
    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.queue: SimpleQueue[Record | BaseException | _Finished] = SimpleQueue()
        self.abandoned = threading.Event()
        super().__init__(tokenizer, self.queue.put)

    def put(self, value: Tensor) -> None:
        if self.abandoned.is_set():
            raise _Abandoned
        super().put(value)


class BayesianTextGenerationPipeline(BayesianPipeline, TextGenerationPipeline):
    """transformers' text generation with a Bayesian model; records as in the module's docstring.

    Takes what ``TextGenerationPipeline`` takes: strings, lists, generators, data sets and chats, ``batch_size``,
    ``num_return_sequences``, ``return_full_text``, ``return_tensors``, ``stop_sequence``, ``streamer`` and whatever
    ``generate`` takes. Its defaults are transformers', too: sampling at temperature 0.7, 256 new tokens.
    """

    model_class = BayesianModelForCausalLM
    model: BayesianModelForCausalLM

    def __init__(self, model: BayesianModel, tokenizer: PreTrainedTokenizerBase | None = None, **kwargs: Any) -> None:
        super().__init__(model, tokenizer, **kwargs)
        self._abstain: bool | Abstention = kwargs.get("abstain") or False

    def __call__(self, text_inputs: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        self.check_texts(text_inputs)
        return super().__call__(text_inputs, **kwargs)

    def _sanitize_parameters(self, *args: Any, abstain: bool | Abstention | None = None, **kwargs: Any) -> Any:
        found = super()._sanitize_parameters(*args, **kwargs)
        if abstain is not None:
            found[-1]["abstain"] = rule_for(self.model, abstain, ANSWER_MEASURES)
        return found

    def _prepare_generate_kwargs(self, generate_kwargs: dict[str, Any], **overrides: Any) -> dict[str, Any]:
        prepared: dict[str, Any] = super()._prepare_generate_kwargs(
            generate_kwargs, return_dict_in_generate=True, **overrides
        )
        return prepared

    def _forward(self, model_inputs: dict[str, Any], **generate_kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        outputs: dict[str, Any] = super()._forward(model_inputs, **generate_kwargs)  # type: ignore[no-untyped-call]
        outputs.update(outputs.pop("additional_outputs", {}))  # there, the scores are inside
        outputs.pop("beam_indices", None)
        return outputs

    def postprocess(  # type: ignore[override]
        self, model_outputs: dict[str, Any], *args: Any, abstain: Abstention | None = None, **kwargs: Any
    ) -> list[Record]:
        scores = {name: model_outputs[name][0] for name in Scores._fields}
        rest = {name: value for name, value in model_outputs.items() if name not in Scores._fields}
        records: list[Record] = super().postprocess(rest, *args, **kwargs)  # type: ignore[no-untyped-call]
        num_new = scores["logprobs"].shape[-1]
        new = model_outputs["generated_sequence"][0][:, -num_new:]
        for row, record in enumerate(records):
            record.update(scored(self.tokenizer, new[row], {name: value[row] for name, value in scores.items()}, ()))
            record.update(self._about_members())
            record.update(decision(record, abstain))
        return records

    def _about_members(self) -> Record:
        """Return the keys of a record that describe the mixture; none without members."""
        if self.model.is_closed_form:
            return {}
        t = self.model.mixture_temperature
        return {"num_members": self.model.num_members} | ({} if t == 1 else {"mixture_temperature": t})

    def stream(self, prompt: Any, **kwargs: Any) -> Generator[Record, None, Record]:
        """Generate and yield each token's record as soon as the token is drawn; the generator's value is the record.

        The numbers are the same as from calling the pipeline with the same state of torch's generator. Generation runs
        in a thread and ends when the iteration stops.

        Args:
            prompt: a string or a chat.
            kwargs: as when calling the pipeline, one sequence and no beams.
        """
        chat = isinstance(prompt, list | tuple) and prompt and all(isinstance(turn, Mapping) for turn in prompt)
        if not isinstance(prompt, str) and not chat:
            raise ValueError(f"a stream has one prompt, a string or a chat (a list of messages); got {prompt!r:.100}")
        return self._stream(prompt, kwargs)

    def _stream(self, prompt: Any, kwargs: dict[str, Any]) -> Generator[Record, None, Record]:
        streamer = _QueueStreamer(self.tokenizer)

        def run() -> None:
            try:
                streamer.queue.put(_Finished(self(prompt, streamer=streamer, **kwargs)))
            except _Abandoned:
                pass
            except BaseException as error:  # to be raised where the tokens are read
                streamer.queue.put(error)

        thread = threading.Thread(target=run, name="hf_bayes-stream", daemon=True)
        thread.start()
        try:
            while True:
                match streamer.queue.get():
                    case _Finished(records=records):
                        return records[0]
                    case BaseException() as error:
                        raise error
                    case token:
                        yield token
        finally:
            streamer.abandoned.set()
            thread.join()

    def score(
        self,
        texts: str | Iterable[str],
        *,
        prompt: str | Iterable[str] | None = None,
        batch_size: int | None = None,
        abstain: bool | Abstention | None = None,
        **tokenizer_kwargs: Any,
    ) -> Any:
        """Score given texts, teacher-forced: return a record for a string, a list of records for several.

        A record has "text" in place of "generated_text". Its tokens are all tokens of the text but the first, which a
        causal model does not predict. That is the whole text if the tokenizer begins it with a token of its own.

        With a prompt, the text is an answer after it. The record has "prompt", too, and its tokens are all tokens of
        the answer. Prompt and answer are tokenized as one text, so a space between them belongs to either. A token with
        characters of both counts as the answer's.

        Args:
            texts: strings; without a prompt of two tokens or more.
            prompt: a prompt for all texts, or one for each.
            batch_size: texts at a time; None takes the pipeline's batch size, else 1. Answers go one at a time.
            abstain: as when calling the pipeline; None takes what the pipeline was made with.
            tokenizer_kwargs: such as ``add_special_tokens`` or ``truncation``.
        Raises:
            ValueError: for a text of fewer than two tokens, for an object that is not a text, for another number of
                prompts than texts, and for keywords that the tokenizer does not take.
        """
        self.check_tokenizer_arguments(self.tokenizer, tokenizer_kwargs, taken=_OWN)
        if batch_size is not None and not is_count(batch_size):
            raise ValueError(
                f"batch_size is how many texts go through the model at a time, got {batch_size!r}: give 1 or more"
            )
        if isinstance(texts, str):
            if prompt is not None and not isinstance(prompt, str):
                raise ValueError(f"one text has one prompt, a string, got {prompt!r:.100}")
            return self.score([texts], prompt=prompt, batch_size=1, abstain=abstain, **tokenizer_kwargs)[0]
        texts = list(texts) if isinstance(texts, Iterable) else [texts]
        if odd := [text for text in texts if not isinstance(text, str)]:
            raise ValueError(f"score takes a string or strings, got {odd[0]!r:.100}")
        if not texts:
            raise ValueError("score takes a string or strings, got an empty list: give one text or more")
        rule = rule_for(self.model, self._abstain if abstain is None else abstain, ANSWER_MEASURES)
        if prompt is not None:
            require_offsets(self.tokenizer)
            pairs = zip(prompts_of(prompt, len(texts)), texts, strict=True)
            records = [self._score_answer(before, text, tokenizer_kwargs) for before, text in pairs]
        else:
            size, records = batch_size or batch_size_of(self) or 1, []
            for start in range(0, len(texts), size):
                records += self._score_batch(texts[start : start + size], tokenizer_kwargs)
        return [{**record, **decision(record, rule)} for record in records]

    def _score_answer(self, prompt: str, text: str, tokenizer_kwargs: dict[str, Any]) -> Record:
        inputs = self.tokenizer(prompt + text, return_tensors="pt", return_offsets_mapping=True, **tokenizer_kwargs)
        ids, first = inputs["input_ids"], answer_start(inputs.pop("offset_mapping")[0].tolist(), prompt, text)
        with self.device_placement():
            scores = self.model.score(ids.to(self.device), first=first)._asdict()
        own = {name: value[0].cpu() for name, value in scores.items()}
        found = scored(self.tokenizer, ids[0, first:], own, ids[0, :first].tolist())
        return {"prompt": prompt, "text": text, **found, **self._about_members()}

    def _score_batch(self, texts: list[str], tokenizer_kwargs: dict[str, Any]) -> list[Record]:
        inputs = self.tokenizer(texts, padding=len(texts) > 1, return_tensors="pt", **tokenizer_kwargs)
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        for text, length in zip(texts, mask.sum(1).tolist(), strict=True):
            if length < 2:
                raise ValueError(f"a text needs two tokens or more to be scored, got {length:.0f} in {text!r}")
        with self.device_placement():
            scores = self.model.score(ids.to(self.device), mask.to(self.device))._asdict()
        records = []
        for row, text in enumerate(texts):
            own = {name: value[row].cpu() for name, value in scores.items()}
            first = ids[row, int(mask[row].argmax())].item()
            found = scored(self.tokenizer, ids[row, 1:], own, [first])
            records.append({"text": text, **found, **self._about_members()})
        return records
