"""Text about images whose records carry total, aleatoric and epistemic uncertainty.

A record is transformers' own, {"input_text", "generated_text"}, with the keys "tokens" and "uncertainty" of
"bayesian-text-generation" (``pipelines.text_generation``), and with ``abstain`` its key "abstained".
"""

from __future__ import annotations

import inspect
import re
from typing import Any

from torch import Tensor
from transformers import ImageTextToTextPipeline
from transformers.processing_utils import TextKwargs

from hf_bayes.decide.abstention import rule_for
from hf_bayes.models.image_text import BayesianModelForImageTextToText
from hf_bayes.models.language.token_uncertainty import Scores
from hf_bayes.pipelines.construction import BayesianPipeline
from hf_bayes.pipelines.records import Record, decision, scored
from hf_bayes.posteriors.abstention import ANSWER_MEASURES, Abstention
from hf_bayes.posteriors.storage.json_types import as_list

_OF_CHATS = ("tools", "documents", "chat_template", "add_generation_prompt")
"""Arguments of a processor's ``apply_chat_template``."""

_OF_PARTS = ("text_kwargs", "images_kwargs", "videos_kwargs", "audio_kwargs", "common_kwargs")
"""Arguments of a processor that hold the settings of one of its parts."""


class BayesianImageTextToTextPipeline(BayesianPipeline, ImageTextToTextPipeline):
    """transformers' image-text-to-text with a Bayesian model; records as in the module's docstring.

    Takes what ``ImageTextToTextPipeline`` takes: ``images=`` and ``text=``, or chats with images among their messages,
    ``max_new_tokens``, ``return_full_text``, ``stop_sequence``, ``generate_kwargs``, settings of the processor and the
    variables of its chat template; and ``abstain`` as "bayesian-text-generation".
    """

    model_class = BayesianModelForImageTextToText
    reads = "processor"
    model: BayesianModelForImageTextToText

    def _sanitize_parameters(self, abstain: bool | Abstention | None = None, **kwargs: Any) -> Any:  # type: ignore[override]
        self.check_loading_arguments(kwargs)
        own = [*inspect.signature(ImageTextToTextPipeline._sanitize_parameters).parameters][1:-1]
        if unknown := [name for name in kwargs if name not in own and not self._reads(name)]:
            raise ValueError(
                f"{self.task_name} takes no {', '.join(unknown)}: give settings of generate in generate_kwargs="
                f"{{...}}. Beside those of the processor, a call takes abstain, {', '.join(own)}"
            )
        found = super()._sanitize_parameters(**kwargs)
        if abstain is not None:
            found[-1]["abstain"] = rule_for(self.model, abstain, ANSWER_MEASURES)
        return found

    def _reads(self, name: str) -> bool:
        """Return whether the processor reads a keyword: its tokenizer, its images' part, or its chat template."""
        assert self.processor is not None  # transformers requires one
        images = self.processor.image_processor.valid_kwargs.__annotations__
        texts = [*inspect.signature(self.processor.tokenizer.__call__).parameters, *TextKwargs.__annotations__]
        known = {*texts, *images, *_OF_CHATS, *_OF_PARTS}
        return name in known - {"kwargs"} or bool(re.search(rf"\b{name}\b", str(self.processor.chat_template or "")))

    def _forward(self, model_inputs: Any, generate_kwargs: dict[str, Any] | None = None) -> dict[str, Any]:  # type: ignore[override]
        prompt, ids = model_inputs.pop("text"), model_inputs["input_ids"]
        settings = self._prepare_generate_kwargs(dict(generate_kwargs or {}), return_dict_in_generate=True)
        output = self.model.generate(**model_inputs, **settings)

        def by_prompt(values: Tensor) -> Tensor:
            """Return [rows, ...] as [prompts, sequences of each, ...] if there are several sequences of a prompt."""
            if len(values) == len(ids):
                return values
            return values.reshape(len(ids), len(values) // len(ids), *values.shape[1:])

        scores = {name: by_prompt(output[name]) for name in Scores._fields}
        return {"generated_sequence": by_prompt(output.sequences), "prompt_text": prompt, "input_ids": ids, **scores}

    def postprocess(  # type: ignore[override]
        self, model_outputs: dict[str, Any], *args: Any, abstain: Abstention | None = None, **kwargs: Any
    ) -> list[Record]:
        outputs = _one_row_a_sequence(model_outputs)
        scores = {name: outputs.pop(name) for name in Scores._fields}
        records: list[Record] = super().postprocess(outputs, *args, **kwargs)  # type: ignore[no-untyped-call]
        new = outputs["generated_sequence"][:, -scores["logprobs"].shape[-1] :]
        for row, record in enumerate(records):
            own = {name: value[row] for name, value in scores.items()}
            record.update(scored(self.tokenizer, new[row], own, ()))
            record.update(decision(record, abstain))
        return records


def _one_row_a_sequence(outputs: dict[str, Any]) -> dict[str, Any]:
    """Return outputs [prompts, sequences of each, ...] as [rows, ...], each prompt once for each of its sequences."""
    nested = outputs["generated_sequence"]
    if nested.ndim == 2:
        return dict(outputs)
    count, texts = nested.shape[1], outputs["prompt_text"]
    flat = {name: outputs[name].flatten(0, 1) for name in ("generated_sequence", *Scores._fields)}
    texts = [text for text in as_list(texts) for _ in range(count)]
    return {**outputs, **flat, "prompt_text": texts, "input_ids": outputs["input_ids"].repeat_interleave(count, 0)}
