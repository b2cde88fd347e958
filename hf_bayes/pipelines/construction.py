"""What all pipelines have in common: the model they take, and where it stays."""

from __future__ import annotations

import inspect
from typing import Any, ClassVar

from transformers import Pipeline, PreTrainedTokenizerBase

from hf_bayes.model import BayesianModel
from hf_bayes.tasks import TASKS


class BayesianPipeline(Pipeline):
    """A pipeline of transformers with a Bayesian model; to be named before the pipeline of transformers it is one of.

    Attributes:
        task_name: what ``hf_bayes.pipeline`` and ``transformers.pipeline`` call it, by ``hf_bayes.tasks``.
        model_class: what its model has to be.
        reads: what it reads its inputs with: "tokenizer", "image_processor", "feature_extractor" or "processor".
    """

    task_name: ClassVar[str]
    model_class: ClassVar[type[BayesianModel]]
    reads: ClassVar[str] = "tokenizer"

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "model_class" in vars(cls):
            cls.task_name = TASKS[cls.model_class.task].pipeline

    def __init__(self, model: BayesianModel, tokenizer: PreTrainedTokenizerBase | None = None, **kwargs: Any) -> None:
        self.check_model(model)
        if kwargs.get("device") is None and getattr(model.core, "hf_device_map", None):
            # accelerate has placed the model, and transformers looks for its map on the outer model only
            kwargs["device"] = model.device
        super().__init__(model=model, tokenizer=tokenizer, **kwargs)

    @classmethod
    def check_model(cls, model: Any) -> None:
        """Raise if a model is of another kind than this pipeline's."""
        task, expected = cls.task_name, cls.model_class
        if not isinstance(model, expected):
            raise ValueError(
                f"{task} needs a {expected.__name__}, got {type(model).__name__}. Give the posterior's directory or "
                f"repository to hf_bayes.pipeline({task!r}, ...), or a model from "
                f"{expected.__name__}.from_pretrained(...)"
            )

    def check_model_type(self, supported_models: Any) -> None:
        """Done at construction: transformers would look the class up in a list of its own models."""

    def call_without_cache(self, inputs: Any) -> Any:
        """The model's answer to whole texts. A causal backbone would keep the keys and values of all members."""
        if "use_cache" in inspect.signature(self.model.core.forward).parameters:
            inputs = {**inputs, "use_cache": False}
        return self.model(**inputs)
