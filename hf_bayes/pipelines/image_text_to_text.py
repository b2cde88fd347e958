"""Text about images whose records carry total, aleatoric and epistemic uncertainty.

A record is transformers' own, {"input_text", "generated_text"}, with the keys "tokens" and "uncertainty" of
"bayesian-text-generation" (``pipelines.text_generation``).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import ImageTextToTextPipeline

from hf_bayes.models.image_text import BayesianModelForImageTextToText
from hf_bayes.models.language.token_uncertainty import Scores
from hf_bayes.pipelines.construction import BayesianPipeline
from hf_bayes.pipelines.records import Record, scored
from hf_bayes.posteriors.storage.json_types import as_list


class BayesianImageTextToTextPipeline(BayesianPipeline, ImageTextToTextPipeline):
    """transformers' image-text-to-text with a Bayesian model; records as in the module's docstring.

    Takes what ``ImageTextToTextPipeline`` takes: ``images=`` and ``text=``, or chats with images among their messages,
    ``max_new_tokens``, ``return_full_text``, ``stop_sequence`` and ``generate_kwargs``.
    """

    model_class = BayesianModelForImageTextToText
    reads = "processor"
    model: BayesianModelForImageTextToText

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

    def postprocess(self, model_outputs: dict[str, Any], *args: Any, **kwargs: Any) -> list[Record]:
        outputs = _one_row_a_sequence(model_outputs)
        scores = {name: outputs.pop(name) for name in Scores._fields}
        records: list[Record] = super().postprocess(outputs, *args, **kwargs)  # type: ignore[no-untyped-call]
        new = outputs["generated_sequence"][:, -scores["logprobs"].shape[-1] :]
        for row, record in enumerate(records):
            own = {name: value[row] for name, value in scores.items()}
            record.update(scored(self.tokenizer, new[row], own, ()))
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
