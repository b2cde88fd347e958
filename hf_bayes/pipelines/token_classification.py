"""Token classification whose records carry total, aleatoric and epistemic uncertainty.

A record of a token is transformers' own, with one more key::

    {"entity", "score", "index", "word", "start", "end", "uncertainty": {"total", "aleatoric", "epistemic"}}

in nats (a linearised model may not define all of them). ``score`` is the mixture's probability of the token's label.
With an ``aggregation_strategy`` a record describes an entity, and each uncertainty is a mean over all tokens of the
entity's words, also over tokens that the strategy ignores for the label.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

from transformers import PreTrainedTokenizerBase, TokenClassificationPipeline
from transformers.pipelines.token_classification import AggregationStrategy

from hf_bayes.members.compat.transformers import preprocess_settings_of
from hf_bayes.models.base import BayesianModel
from hf_bayes.models.token_classification import BayesianModelForTokenClassification
from hf_bayes.pipelines.construction import BayesianPipeline
from hf_bayes.pipelines.records import PARTS, Record

_TOKENS = "tokens"
"""Key under which an unfinished entity keeps the places of its tokens."""


class BayesianTokenClassificationPipeline(BayesianPipeline, TokenClassificationPipeline):
    """transformers' token classification with a Bayesian model; records as in the module's docstring.

    Takes what ``TokenClassificationPipeline`` takes: texts, or lists of words with ``is_split_into_words`` (and
    ``delimiter``), in lists, generators and data sets, ``batch_size``, ``aggregation_strategy``, ``ignore_labels``,
    ``stride``, and for one text ``offset_mapping``.
    """

    model_class = BayesianModelForTokenClassification

    def __init__(self, model: BayesianModel, tokenizer: PreTrainedTokenizerBase | None = None, **kwargs: Any) -> None:
        if lost := [name for name in ("is_split_into_words", "delimiter", "offset_mapping") if name in kwargs]:
            # every call of transformers' pipeline sets these anew
            raise ValueError(
                f"{', '.join(lost)}: what one input is like, and no default of a pipeline: give it in calls"
            )
        super().__init__(model, tokenizer, **kwargs)

    def __call__(self, inputs: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        if isinstance(inputs, tuple):
            inputs = list(inputs)
        self.check_texts(inputs)
        if kwargs.get("offset_mapping"):
            if not isinstance(inputs, str) and not (isinstance(inputs, list) and len(inputs) == 1):
                # transformers would read the first text's offsets for all of them
                raise ValueError("offset_mapping is that of one text, got several texts: give one text at a time")
            if kwargs.get("stride") is not None or "tokenizer_params" in preprocess_settings_of(self):
                raise ValueError(
                    "offset_mapping is that of a whole text, and with stride= every chunk would read it from its "
                    "start: leave out one of them"
                )
        if kwargs.get("is_split_into_words") and not isinstance(inputs, list):
            # transformers reads a generator to its end to see what it holds, and has nothing left to tag
            return super(TokenClassificationPipeline, self).__call__(inputs, **kwargs)  # type: ignore[no-untyped-call]
        return super().__call__(inputs, **kwargs)

    def preprocess(self, sentence: Any, offset_mapping: Any = None, **kwargs: Any) -> Any:  # type: ignore[override]
        # transformers writes into these settings of the pipeline that one input came in words
        for chunk in super().preprocess(sentence, offset_mapping, **copy.deepcopy(kwargs)):  # type: ignore[no-untyped-call]
            if chunk["input_ids"].numel() == 0:  # the tokenizer adds no tokens of its own
                raise ValueError(f"a text needs a token or more to be tagged, got none in {sentence!r:.100}")
            yield chunk

    def _sanitize_parameters(self, **kwargs: Any) -> Any:  # type: ignore[override]
        known = list(inspect.signature(TokenClassificationPipeline._sanitize_parameters).parameters)[1:]
        if unknown := [name for name in kwargs if name not in known]:
            raise ValueError(
                f"{self.task_name} takes no {', '.join(unknown)}: a token has one record, with its likeliest label and "
                f"that label's probability. Beside batch_size and num_workers it takes {', '.join(known)}"
            )
        strategy, strategies = kwargs.get("aggregation_strategy"), AggregationStrategy.__members__
        if isinstance(strategy, str) and strategy.upper() not in strategies:
            names = ", ".join(repr(name.lower()) for name in strategies)
            raise ValueError(f"unknown aggregation_strategy {strategy!r}: expected one of {names}")
        if (kwargs.get("stride") or 0) < 0:
            raise ValueError(f"stride is by how many tokens chunks overlap, got {kwargs['stride']}: give 0 or more")
        if isinstance(kwargs.get("ignore_labels"), str):
            raise ValueError(
                f"ignore_labels is a list of labels, got the text {kwargs['ignore_labels']!r}: give "
                f"[{kwargs['ignore_labels']!r}]"
            )
        return super()._sanitize_parameters(**kwargs)

    def _forward(self, model_inputs: dict[str, Any]) -> dict[str, Any]:  # type: ignore[override]
        inputs = {name: model_inputs[name] for name in self.tokenizer.model_input_names if name in model_inputs}
        output = self.call_without_cache(inputs)
        # logits first: transformers counts the rows of a batch by the first entry
        return {name: output[name] for name in ("logits", *PARTS) if name in output} | model_inputs

    def postprocess(self, all_outputs: list[dict[str, Any]], *args: Any, **kwargs: Any) -> list[Record]:  # type: ignore[override]
        whole = {name: all_outputs[0].get(name) for name in ("sentence", "word_to_chars_map")}
        entities = []
        for outputs in all_outputs:  # chunks of a long text, each with places of its own
            for entity in super().postprocess([outputs | whole], *args, **kwargs):  # type: ignore[no-untyped-call]
                tokens = entity.pop(_TOKENS, None) or [entity["index"]]
                means = {part: outputs[part][0, tokens].double().mean().item() for part in PARTS if part in outputs}
                entities.append({**entity, "score": float(entity["score"]), "uncertainty": means})
        return self.aggregate_overlapping_entities(entities) if len(all_outputs) > 1 else entities  # type: ignore[no-untyped-call]

    def aggregate_word(self, entities: list[dict[str, Any]], *args: Any, **kwargs: Any) -> dict[str, Any]:
        word: dict[str, Any] = super().aggregate_word(entities, *args, **kwargs)
        return word | {_TOKENS: _places(entities)}

    def group_sub_entities(self, entities: list[dict[str, Any]]) -> dict[str, Any]:
        group: dict[str, Any] = super().group_sub_entities(entities)
        return group | {_TOKENS: _places(entities)}


def _places(entities: list[dict[str, Any]]) -> list[int]:
    return [place for entity in entities for place in entity.get(_TOKENS, [entity.get("index")])]
