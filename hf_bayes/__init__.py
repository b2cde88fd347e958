"""Bayesian fine-tuning for the Hugging Face stack: a Trainer that ends in a posterior instead of a point."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hf_bayes.pipelines.registration import register_when_loaded

__version__ = "0.1.0"

if TYPE_CHECKING:
    from hf_bayes.chains.sampling import sample
    from hf_bayes.fit.laplace import fit_laplace
    from hf_bayes.fit.mc_dropout import fit_mc_dropout
    from hf_bayes.fit.prior_predictive import prior_predictive
    from hf_bayes.fit.swag import fit_swag
    from hf_bayes.methods.registry import METHODS
    from hf_bayes.models.attaching import attach
    from hf_bayes.models.audio_classification import BayesianModelForAudioClassification
    from hf_bayes.models.causal_lm import BayesianModelForCausalLM
    from hf_bayes.models.classification import BayesianModelForSequenceClassification
    from hf_bayes.models.image_classification import BayesianModelForImageClassification
    from hf_bayes.models.image_text import BayesianModelForImageTextToText
    from hf_bayes.models.token_classification import BayesianModelForTokenClassification
    from hf_bayes.pipelines.factory import pipeline
    from hf_bayes.pipelines.records import UncertaintyStreamer
    from hf_bayes.pipelines.rendering import print_record, to_html, to_terminal
    from hf_bayes.posteriors.posterior import Posterior
    from hf_bayes.training.arguments import BayesianTrainingArguments
    from hf_bayes.training.trainer import BayesianTrainer, BayesianTrainerMixin
    from hf_bayes.uncertainty.decomposition import decompose, mixture

_WHERE = {
    "METHODS": "methods.registry",
    "Posterior": "posteriors.posterior",
    "BayesianModelForAudioClassification": "models.audio_classification",
    "BayesianModelForCausalLM": "models.causal_lm",
    "BayesianModelForImageClassification": "models.image_classification",
    "BayesianModelForImageTextToText": "models.image_text",
    "BayesianModelForSequenceClassification": "models.classification",
    "BayesianModelForTokenClassification": "models.token_classification",
    "UncertaintyStreamer": "pipelines.records",
    "attach": "models.attaching",
    "pipeline": "pipelines.factory",
    "print_record": "pipelines.rendering",
    "prior_predictive": "fit.prior_predictive",
    "to_html": "pipelines.rendering",
    "to_terminal": "pipelines.rendering",
    "sample": "chains.sampling",
    "BayesianTrainer": "training.trainer",
    "BayesianTrainerMixin": "training.trainer",
    "BayesianTrainingArguments": "training.arguments",
    "fit_laplace": "fit.laplace",
    "fit_mc_dropout": "fit.mc_dropout",
    "fit_swag": "fit.swag",
    "decompose": "uncertainty.decomposition",
    "mixture": "uncertainty.decomposition",
}
"""Public name -> module. Loaded when first asked for, so that the mathematics imports without transformers."""

__all__ = [
    "METHODS",
    "BayesianModelForAudioClassification",
    "BayesianModelForCausalLM",
    "BayesianModelForImageClassification",
    "BayesianModelForImageTextToText",
    "BayesianModelForSequenceClassification",
    "BayesianModelForTokenClassification",
    "BayesianTrainer",
    "BayesianTrainerMixin",
    "BayesianTrainingArguments",
    "Posterior",
    "UncertaintyStreamer",
    "attach",
    "decompose",
    "fit_laplace",
    "fit_mc_dropout",
    "fit_swag",
    "mixture",
    "pipeline",
    "print_record",
    "prior_predictive",
    "sample",
    "to_html",
    "to_terminal",
]


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(importlib.import_module(f"hf_bayes.{_WHERE[name]}"), name)
    if name.endswith("Config"):  # every method's config, by the one table that knows them all
        configs = {
            config.__name__: config for config in importlib.import_module("hf_bayes.methods.registry").METHODS.values()
        }
        if name in configs:
            return configs[name]
    raise AttributeError(f"module 'hf_bayes' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


register_when_loaded()
