"""The common part of all pipelines: checks of the model and the inputs, and the model's device."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Collection, Iterable, Mapping
from typing import Any, ClassVar

from transformers import Pipeline, PreTrainedTokenizerBase

from hf_bayes.models.base import BayesianModel
from hf_bayes.models.input_check import check_vocabulary
from hf_bayes.posteriors.hub import LOCATION
from hf_bayes.posteriors.tasks import TASKS

_LOADING = ("members", "prediction", "calibrated", "base_model", "check_base", *LOCATION)
_NEAR = 0.75  # num_members is at 0.78 of members, and mems (XLNet's), the nearest name of transformers, at 0.73


class BayesianPipeline(Pipeline):
    """A pipeline of transformers with a Bayesian model. A subclass names it before the pipeline of transformers.

    Attributes:
        task_name: its name in ``hf_bayes.pipeline`` and ``transformers.pipeline``, from ``posteriors.tasks``.
        model_class: the class of its model.
        reads: the object that reads inputs: "tokenizer", "image_processor", "feature_extractor" or "processor".
    """

    task_name: ClassVar[str]
    model_class: ClassVar[type[BayesianModel]]
    reads: ClassVar[str] = "tokenizer"
    model: BayesianModel
    tokenizer: Any

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "model_class" in vars(cls):
            cls.task_name = TASKS[cls.model_class.task].pipeline

    def __init__(self, model: BayesianModel, tokenizer: PreTrainedTokenizerBase | None = None, **kwargs: Any) -> None:
        self.check_model(model)
        if kwargs.get("device") is None and getattr(model.core, "hf_device_map", None):
            # accelerate has placed the model, but transformers reads the map of the outer model only
            kwargs["device"] = model.device
        if tokenizer is not None:
            check_vocabulary(tokenizer, model.core)
        super().__init__(model=model, tokenizer=tokenizer, **kwargs)  # type: ignore[arg-type]

    @classmethod
    def check_model(cls, model: Any) -> None:
        """Raise if a model is not of this pipeline's kind."""
        task, expected = cls.task_name, cls.model_class
        if not isinstance(model, expected):
            raise ValueError(
                f"{task} needs a {expected.__name__}, got {type(model).__name__}. Give the posterior's directory or "
                f"repository to hf_bayes.pipeline({task!r}, ...), or a model from "
                f"{expected.__name__}.from_pretrained(...)"
            )

    @classmethod
    def check_texts(cls, inputs: Any) -> None:
        """Raise a ValueError for inputs that are not texts: None, numbers, an empty list.

        Generators and data sets are not checked, since they can be read only once.
        """
        given = inputs if isinstance(inputs, list | tuple) else [inputs]
        odd = [each for each in given if each is None or isinstance(each, bytes | bool | int | float) or each == {}]
        if odd or not given:
            raise ValueError(
                f"{cls.task_name} takes a text or a list of texts, got {(odd[0] if odd else inputs)!r:.100}: give one "
                "text or more"
            )

    @classmethod
    def check_loading_arguments(cls, given: Iterable[str]) -> None:
        """Raise a ValueError for a keyword that is, or nearly is, an argument of ``hf_bayes.pipeline`` for loading."""
        for name in given:
            if near := difflib.get_close_matches(name, _LOADING, n=1, cutoff=_NEAR):
                raise ValueError(
                    f"{getattr(cls, 'task_name', 'pipeline')} takes no {name}. Did you mean {near[0]}= of "
                    "hf_bayes.pipeline, for loading a posterior?"
                )

    def _sanitize_parameters(self, *args: Any, **kwargs: Any) -> Any:
        self.check_loading_arguments(kwargs)  # transformers would give them to generate, at the first call
        return super()._sanitize_parameters(*args, **kwargs)  # type: ignore[no-untyped-call, safe-super]

    @classmethod
    def check_tokenizer_arguments(cls, tokenizer: Any, given: Mapping[str, Any], *, taken: Collection[str]) -> None:
        """Raise a ValueError for keywords that a tokenizer would ignore silently.

        Args:
            taken: keywords of the tokenizer that the caller may not set.
        """
        known = [
            name
            for name, parameter in inspect.signature(tokenizer.__call__).parameters.items()
            if parameter.kind is not parameter.VAR_KEYWORD and name not in taken
        ]
        if unknown := [name for name in given if name not in known]:
            near = difflib.get_close_matches(unknown[0], _LOADING, n=1)
            advice = f". Did you mean {near[0]}= of hf_bayes.pipeline, for loading a posterior?" if near else ""
            raise ValueError(
                f"{cls.task_name} takes no {', '.join(unknown)} here: what is left goes to the tokenizer, which takes "
                f"{', '.join(known)}{advice}"
            )

    def check_model_type(self, supported_models: Any) -> None:
        """Do nothing: ``check_model`` has checked the model, and transformers' check accepts only its own classes."""

    def call_without_cache(self, inputs: Any) -> Any:
        """Return the model's output for whole texts, without the cache in which a causal backbone keeps all members."""
        if "use_cache" in inspect.signature(self.model.core.forward).parameters:
            inputs = {**inputs, "use_cache": False}
        return self.model(**inputs)
