"""Text about images whose records carry total, aleatoric and epistemic uncertainty.

A record is transformers' own, {"input_text", "generated_text"}, with the keys "tokens" and "uncertainty" of
"bayesian-text-generation" (``pipelines.text_generation``).
"""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor
from transformers import ImageTextToTextPipeline

from hf_bayes.models.image_text import BayesianModelForImageTextToText
from hf_bayes.models.token_uncertainty import Scores
from hf_bayes.pipelines.construction import BayesianPipeline
from hf_bayes.pipelines.records import Record, scored


class BayesianImageTextToTextPipeline(BayesianPipeline, ImageTextToTextPipeline):
    """transformers' image-text-to-text with a Bayesian model; records as in the module's docstring.

    Takes what ``ImageTextToTextPipeline`` takes: ``images=`` and ``text=``, or chats with images among their messages,
    ``max_new_tokens``, ``return_full_text``, ``stop_sequence`` and ``generate_kwargs``.
    """

    model_class = BayesianModelForImageTextToText
    reads = "processor"

    def _forward(self, model_inputs: Any, generate_kwargs: dict[str, Any] | None = None) -> dict[str, Any]:
        prompt, ids = model_inputs.pop("text"), model_inputs["input_ids"]
        output = self.model.generate(**model_inputs, **self._settings(dict(generate_kwargs or {})))

        def by_prompt(values: Tensor) -> Tensor:
            """Return [rows, ...] as [prompts, sequences of each, ...] if there are several sequences of a prompt."""
            if len(values) == len(ids):
                return values
            return values.reshape(len(ids), len(values) // len(ids), *values.shape[1:])

        scores = {name: by_prompt(output[name]) for name in Scores._fields}
        return {"generated_sequence": by_prompt(output.sequences), "prompt_text": prompt, "input_ids": ids, **scores}

    def _settings(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of ``generate``."""
        if hasattr(self, "_prepare_generate_kwargs"):
            prepared: dict[str, Any] = self._prepare_generate_kwargs(given, return_dict_in_generate=True)
            return prepared
        config: Any = copy.copy(given.get("generation_config", self.generation_config))  # type: ignore[attr-defined]  # transformers 5.17
        config.return_dict_in_generate = True
        return {**given, "generation_config": config}

    def postprocess(self, model_outputs: dict[str, Any], *args: Any, **kwargs: Any) -> list[Record]:
        rest = {name: value for name, value in model_outputs.items() if name not in Scores._fields}
        records: list[Record] = super().postprocess(rest, *args, **kwargs)
        nested = model_outputs["generated_sequence"].ndim == 3

        def flat(values: Tensor) -> Tensor:
            return values.flatten(0, 1) if nested else values

        scores = {name: flat(model_outputs[name]) for name in Scores._fields}
        new = flat(model_outputs["generated_sequence"])[:, -scores["logprobs"].shape[-1] :]
        for row, record in enumerate(records):
            own = {name: value[row] for name, value in scores.items()}
            record.update(scored(self.tokenizer, new[row], own, ()))
        return records
