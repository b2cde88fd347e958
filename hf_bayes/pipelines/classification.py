"""Classification of texts, images and audio whose records carry total, aleatoric and epistemic uncertainty.

A record is transformers' own, {"label", "score"}, with one more key, "uncertainty": {"total", "aleatoric",
"epistemic"} of the input in nats (a linearised model may not define all of them). With ``top_k`` each record has the
key. Scores are probabilities of the mixture. For regression they are predictive means, and "uncertainty" holds
{"predictive_std", "epistemic_std"} of the record's own output, in units of the labels. For several labels the
uncertainties are sums over all labels of the input (``uncertainty.several_labels``).

Under a user's likelihood there is a record for each class, or for each number of a label, then with "aleatoric_std",
too. The config names outputs of the head. Where labels have another number of classes or numbers than the head has
outputs, they are "LABEL_0", "LABEL_1", ...: transformers' names for labels without names.

With ``abstain`` each record of classes has one more key, "abstained": True if the answer should be withheld.
``abstain`` is True for the threshold that is stored with the posterior (``decide.abstention``), or an ``Abstention``.

``function_to_apply`` is "softmax" for classes, "sigmoid" for several labels, "none" for numbers. "none" gives the
mixture's log-probabilities of classes, and for several labels the logits of the mean probabilities. A function that
gives no quantity of the posterior is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from transformers import AudioClassificationPipeline, ImageClassificationPipeline, TextClassificationPipeline

from hf_bayes.core.tensors import tensors_in
from hf_bayes.decide.abstention import class_uncertainty, rule_for
from hf_bayes.members.inputs import num_positions_of
from hf_bayes.models.audio_classification import BayesianModelForAudioClassification
from hf_bayes.models.classification import BayesianModelForSequenceClassification
from hf_bayes.models.image_classification import BayesianModelForImageClassification
from hf_bayes.pipelines.construction import BayesianPipeline
from hf_bayes.pipelines.records import PARTS
from hf_bayes.posteriors.abstention import CLASS_MEASURES, Abstention
from hf_bayes.posteriors.storage.json_types import as_list
from hf_bayes.uncertainty.custom.adapted import Adapted
from hf_bayes.uncertainty.custom.weighted import without_weights
from hf_bayes.uncertainty.likelihoods import Categorical, Likelihood, Normal
from hf_bayes.uncertainty.several_labels import Bernoulli

_FUNCTIONS: dict[type[Likelihood], tuple[str, ...]] = {
    Categorical: ("softmax", "none"),
    Bernoulli: ("sigmoid", "none"),
    Normal: ("none",),
}
"""Functions that may be applied to a head's outputs; the first gives the scores."""


DEVIATIONS = ("predictive_std", "aleatoric_std", "epistemic_std")
"""The uncertainties of a number; only a user's likelihood has the second one."""

_LENGTH = "length_of_recording"
"""Key of [B], the length of each recording before a batch was padded."""

_TEXTS = ("text", "text_pair", "text_target", "text_pair_target")
"""Arguments of a tokenizer that are inputs of the pipeline."""


class _ScoredPipeline(BayesianPipeline):
    """A pipeline with one output for each input, and ``top_k`` records of it."""

    def __call__(self, inputs: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        if isinstance(inputs, list) and not inputs:
            raise ValueError(f"{self.task_name} got an empty list: give one input or more")
        if self.reads == "tokenizer":
            self.check_texts(inputs)
        return super().__call__(inputs, **kwargs)  # type: ignore[no-untyped-call]

    def _sanitize_parameters(
        self, function_to_apply: str | None = None, abstain: bool | Abstention | None = None, **kwargs: Any
    ) -> Any:
        if isinstance(function_to_apply, str):
            given, known, function_to_apply = function_to_apply, self._functions(), function_to_apply.lower()
            if function_to_apply not in known:
                raise ValueError(
                    f"function_to_apply={str(given)!r} has no meaning for a "
                    f"{self.model.likelihood.name} likelihood: expected {' or '.join(map(repr, known))}. "
                    f"Leave it out for {known[0]!r}"
                )
        top_k = kwargs.get("top_k")
        if isinstance(top_k, int) and top_k < 1:
            raise ValueError(f"top_k is how many labels are returned, got {top_k}: give 1 or more")
        with self._answers_named():
            found = super()._sanitize_parameters(function_to_apply=function_to_apply, **kwargs)
        if abstain is not None:
            if not self.model.likelihood.predicts_classes:
                raise ValueError(
                    f"abstain= is for classes of a head, and the labels here have a {self.model.likelihood.name} "
                    "likelihood: leave abstain out, and compare each record's uncertainty with a limit of your own"
                )
            found[-1]["abstain"] = rule_for(self.model, abstain, CLASS_MEASURES)
        return found

    def postprocess(  # type: ignore[override]
        self, model_outputs: Any, function_to_apply: str | None = None, abstain: Abstention | None = None, **kwargs: Any
    ) -> Any:
        # transformers decides by the configuration, and treats a single output as a logit
        applied = function_to_apply or self._functions()[0]
        with self._answers_named() as names:
            result = super().postprocess(model_outputs, function_to_apply=applied, **kwargs)  # type: ignore[arg-type, safe-super]
        for record in as_list(result):
            if "total" in model_outputs:
                record["uncertainty"] = {part: model_outputs[part][0].item() for part in PARTS if part in model_outputs}
            if "predictive_std" in model_outputs:
                # transformers names outputs by id2label; label2id may differ or be missing
                output = next(i for i, name in names.items() if name == record["label"])
                deviations = [part for part in DEVIATIONS if part in model_outputs]
                record["uncertainty"] = {part: model_outputs[part][0, output].item() for part in deviations}
            if abstain is not None:
                values = class_uncertainty(model_outputs["logits"], model_outputs, abstain.measure)
                record["abstained"] = abstain.abstains(float(values[0]))
        return result

    def _functions(self) -> tuple[str, ...]:
        """Return the functions that may be applied.

        Raises:
            ValueError: for preferences, whose rows are pairs.
        """
        likelihood: Any = without_weights(self.model.likelihood)
        if isinstance(likelihood, Adapted):
            return _FUNCTIONS[Normal if likelihood.num_classes is None else Categorical]
        if type(likelihood) not in _FUNCTIONS:
            raise ValueError(
                f"{self.task_name} shows probabilities or numbers of single inputs, and the likelihood here is "
                f"{likelihood.name}: {likelihood.config.instead_of_pipeline}"
            )
        return _FUNCTIONS[type(likelihood)]

    @contextmanager
    def _answers_named(self) -> Iterator[dict[int, str]]:
        """Give the config a name for each class or number of a label, from which records are named; yield the names."""
        config, likelihood = self.model.config, without_weights(self.model.likelihood)
        given = config.id2label
        if isinstance(likelihood, Adapted):
            count = likelihood.num_classes or likelihood.config.label_size
            if count != likelihood.num_outputs:
                config.id2label = {number: f"LABEL_{number}" for number in range(count)}
        try:
            yield cast("dict[int, str]", config.id2label)
        finally:
            config.id2label = given


class BayesianTextClassificationPipeline(_ScoredPipeline, TextClassificationPipeline):  # type: ignore[misc]
    """transformers' text classification with a Bayesian model; records as in the module's docstring."""

    model_class = BayesianModelForSequenceClassification

    def _sanitize_parameters(  # type: ignore[override]
        self,
        function_to_apply: str | None = None,
        abstain: bool | Abstention | None = None,
        top_k: Any = "",
        **kwargs: Any,
    ) -> Any:
        self.check_tokenizer_arguments(self.tokenizer, kwargs, taken=_TEXTS)
        return super()._sanitize_parameters(function_to_apply, abstain, top_k=top_k, **kwargs)

    def _forward(self, model_inputs: Any) -> Any:  # type: ignore[override]
        return self.call_without_cache(model_inputs)


class BayesianImageClassificationPipeline(_ScoredPipeline, ImageClassificationPipeline):  # type: ignore[misc]
    """transformers' image classification with a Bayesian model; records as in the module's docstring.

    Takes what ``ImageClassificationPipeline`` takes: images, arrays, paths and addresses of images, lists, generators
    and data sets of them, ``batch_size``, ``top_k`` (5 by default) and ``timeout``.
    """

    model_class = BayesianModelForImageClassification
    reads = "image_processor"


class BayesianAudioClassificationPipeline(_ScoredPipeline, AudioClassificationPipeline):  # type: ignore[misc]
    """transformers' audio classification with a Bayesian model; records as in the module's docstring.

    Takes what ``AudioClassificationPipeline`` takes: arrays at the feature extractor's sampling rate, paths and
    addresses of audio files, dictionaries {"raw", "sampling_rate"}, lists, generators and data sets of them,
    ``batch_size``, and ``top_k`` (all labels by default). Only recordings of one length go through the model together,
    so that no recording is read with another one's padding.
    """

    model_class = BayesianModelForAudioClassification
    reads = "feature_extractor"

    def preprocess(self, inputs: Any) -> Any:  # type: ignore[override]
        recording = super().preprocess(inputs)  # type: ignore[no-untyped-call]
        recording[_LENGTH] = torch.tensor([num_positions_of(recording)])
        return recording

    def _forward(self, model_inputs: Any) -> Any:  # type: ignore[override]
        inputs = dict(model_inputs)
        lengths, width = inputs.pop(_LENGTH), num_positions_of(inputs)
        pads_left = getattr(self.feature_extractor, "padding_side", "right") == "left"
        outputs, order = [], []
        for length in lengths.unique().tolist():  # transformers pads a batch, with or without an attention mask
            rows = (lengths == length).nonzero()[:, 0]
            places = slice(width - length, None) if pads_left else slice(length)
            some = tensors_in(self.model.take_rows(inputs, rows))
            cut = {name: x[:, places] if x.shape[1:2] == (width,) else x for name, x in some.items()}
            outputs.append(self.model(**{**inputs, **cut}))
            order.append(rows)
        back = torch.cat(order).argsort()
        joined = {name: torch.cat([each[name] for each in outputs])[back] for name in outputs[0]}
        return type(outputs[0])(**joined)
