"""Bayesian fine-tuning for the Hugging Face stack: a Trainer that ends in a posterior instead of a point."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hf_bayes.registration import register_when_loaded

__version__ = "0.1.0"

if TYPE_CHECKING:
    from hf_bayes.artifact import Posterior
    from hf_bayes.attaching import attach
    from hf_bayes.causal_lm import BayesianModelForCausalLM
    from hf_bayes.classification import (
        BayesianModelForAudioClassification,
        BayesianModelForImageClassification,
        BayesianModelForSequenceClassification,
        BayesianModelForTokenClassification,
    )
    from hf_bayes.dropout_fit import fit_mc_dropout
    from hf_bayes.image_text import BayesianModelForImageTextToText
    from hf_bayes.laplace_fit import fit_laplace
    from hf_bayes.methods import METHODS
    from hf_bayes.pipelines import pipeline
    from hf_bayes.prior_histograms import prior_predictive
    from hf_bayes.records import UncertaintyStreamer
    from hf_bayes.rendering import print_record, to_html, to_terminal
    from hf_bayes.sampling import sample
    from hf_bayes.swag_fit import fit_swag
    from hf_bayes.trainer import BayesianTrainer, BayesianTrainerMixin
    from hf_bayes.training_arguments import BayesianTrainingArguments
    from hf_bayes.uncertainty import decompose, mixture

_WHERE = {
    "METHODS": "methods",
    "Posterior": "artifact",
    "BayesianModelForAudioClassification": "classification",
    "BayesianModelForCausalLM": "causal_lm",
    "BayesianModelForImageClassification": "classification",
    "BayesianModelForImageTextToText": "image_text",
    "BayesianModelForSequenceClassification": "classification",
    "BayesianModelForTokenClassification": "classification",
    "UncertaintyStreamer": "records",
    "attach": "attaching",
    "pipeline": "pipelines",
    "print_record": "rendering",
    "prior_predictive": "prior_histograms",
    "to_html": "rendering",
    "to_terminal": "rendering",
    "sample": "sampling",
    "BayesianTrainer": "trainer",
    "BayesianTrainerMixin": "trainer",
    "BayesianTrainingArguments": "training_arguments",
    "fit_laplace": "laplace_fit",
    "fit_mc_dropout": "dropout_fit",
    "fit_swag": "swag_fit",
    "decompose": "uncertainty",
    "mixture": "uncertainty",
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
        configs = {config.__name__: config for config in importlib.import_module("hf_bayes.methods").METHODS.values()}
        if name in configs:
            return configs[name]
    raise AttributeError(f"module 'hf_bayes' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


register_when_loaded()
