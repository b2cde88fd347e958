"""Bayesian fine-tuning for the Hugging Face stack: a Trainer that ends in a posterior instead of a point.

Two members that are certain of different classes disagree: all of the mixture's uncertainty is epistemic (log 2 nats).

>>> import torch
>>> from hf_bayes import SGHMCConfig, decompose, mixture, sample
>>> logits = torch.tensor([[100.0, 0.0], [0.0, 100.0]])  # [members, classes]
>>> mixture(logits).exp()
tensor([0.5000, 0.5000])
>>> total, aleatoric, epistemic = decompose(logits)
>>> round(total.item(), 4), round(aleatoric.item(), 4), round(epistemic.item(), 4)
(0.6931, 0.0, 0.6931)

Methods also sample from a plain energy function. Here four chains sample from a standard Gaussian in two dimensions.

>>> energy = lambda theta, batch: theta.square().sum(1) / 2
>>> result = sample(energy, torch.zeros(4, 2), SGHMCConfig(), num_steps=300, learning_rate=0.1, burn_in=100)
>>> result.draws.shape  # [chains, draws, parameters]
torch.Size([4, 200, 2])
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hf_bayes.pipelines.registration import register_when_loaded

__version__ = "0.1.0"

if TYPE_CHECKING:
    from hf_bayes.chains.sampling import sample
    from hf_bayes.fit.calibration import fit_calibration
    from hf_bayes.fit.distil import distil
    from hf_bayes.fit.function_curvature import curvature_of_function, outputs_of, row_gradients_of_function
    from hf_bayes.fit.laplace import fit_laplace
    from hf_bayes.fit.mc_dropout import fit_mc_dropout
    from hf_bayes.fit.model_curvature import curvature_of_model, row_gradients_of_model
    from hf_bayes.fit.prior_predictive import prior_predictive
    from hf_bayes.fit.single_pass import fit_layer_factors, fit_variance_factor
    from hf_bayes.fit.swag import fit_swag
    from hf_bayes.fit.training_free import fit_training_free
    from hf_bayes.methods.averaging.ensemble import EnsembleConfig
    from hf_bayes.methods.averaging.map import MAPConfig
    from hf_bayes.methods.averaging.mc_dropout import MCDropoutConfig
    from hf_bayes.methods.averaging.sgd_mc import SGDMCConfig
    from hf_bayes.methods.averaging.snapshot import SnapshotConfig
    from hf_bayes.methods.averaging.swa import SWAConfig
    from hf_bayes.methods.averaging.swag import SWAGConfig
    from hf_bayes.methods.laplace.laplace import LaplaceConfig
    from hf_bayes.methods.mcmc.gps import GPSConfig
    from hf_bayes.methods.mcmc.hmc import HMCConfig
    from hf_bayes.methods.mcmc.metropolis import MetropolisConfig
    from hf_bayes.methods.mcmc.penalty import PenaltyConfig
    from hf_bayes.methods.registry import METHODS
    from hf_bayes.methods.sgmcmc.agps import AGPSConfig
    from hf_bayes.methods.sgmcmc.baoab import BAOABConfig
    from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
    from hf_bayes.methods.sgmcmc.sghmc_euler import SGHMCEulerConfig
    from hf_bayes.methods.sgmcmc.sgld import SGLDConfig
    from hf_bayes.methods.sgmcmc.sgnht import SGNHTConfig
    from hf_bayes.methods.variational.blob import BLoBConfig
    from hf_bayes.methods.variational.ekf import EKFConfig
    from hf_bayes.methods.variational.full_rank_vi import FullRankVIConfig
    from hf_bayes.methods.variational.ivon import IVONConfig
    from hf_bayes.methods.variational.low_rank_vi import LowRankVIConfig
    from hf_bayes.methods.variational.mean_field import MeanFieldConfig
    from hf_bayes.methods.variational.training_free import TrainingFreeConfig
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
    from hf_bayes.posteriors.hub import push_directory
    from hf_bayes.posteriors.posterior import Posterior
    from hf_bayes.training.arguments import BayesianTrainingArguments
    from hf_bayes.training.cross_fitting import cross_fit_calibration
    from hf_bayes.training.trainer import BayesianTrainer, BayesianTrainerMixin
    from hf_bayes.training.tuning.tune import tune
    from hf_bayes.uncertainty.custom.base import ClassLogProbs, CustomLikelihood, Moments
    from hf_bayes.uncertainty.custom.bradley_terry import BradleyTerry
    from hf_bayes.uncertainty.custom.direct_preferences import DirectPreferences
    from hf_bayes.uncertainty.custom.heteroscedastic import Heteroscedastic
    from hf_bayes.uncertainty.custom.mixture_density import MixtureDensity
    from hf_bayes.uncertainty.custom.ordinal import Ordinal
    from hf_bayes.uncertainty.custom.poisson import Poisson
    from hf_bayes.uncertainty.custom.registry import register_likelihood
    from hf_bayes.uncertainty.custom.weighted import Weighted
    from hf_bayes.uncertainty.decomposition import decompose, mixture

_MODULES = {
    "METHODS": "methods.registry",
    "AGPSConfig": "methods.sgmcmc.agps",
    "BAOABConfig": "methods.sgmcmc.baoab",
    "BLoBConfig": "methods.variational.blob",
    "BayesianModelForAudioClassification": "models.audio_classification",
    "BayesianModelForCausalLM": "models.causal_lm",
    "BayesianModelForImageClassification": "models.image_classification",
    "BayesianModelForImageTextToText": "models.image_text",
    "BayesianModelForSequenceClassification": "models.classification",
    "BayesianModelForTokenClassification": "models.token_classification",
    "BayesianTrainer": "training.trainer",
    "BayesianTrainerMixin": "training.trainer",
    "BayesianTrainingArguments": "training.arguments",
    "BradleyTerry": "uncertainty.custom.bradley_terry",
    "DirectPreferences": "uncertainty.custom.direct_preferences",
    "ClassLogProbs": "uncertainty.custom.base",
    "Heteroscedastic": "uncertainty.custom.heteroscedastic",
    "MixtureDensity": "uncertainty.custom.mixture_density",
    "Moments": "uncertainty.custom.base",
    "Ordinal": "uncertainty.custom.ordinal",
    "CustomLikelihood": "uncertainty.custom.base",
    "Poisson": "uncertainty.custom.poisson",
    "Weighted": "uncertainty.custom.weighted",
    "register_likelihood": "uncertainty.custom.registry",
    "EnsembleConfig": "methods.averaging.ensemble",
    "GPSConfig": "methods.mcmc.gps",
    "HMCConfig": "methods.mcmc.hmc",
    "IVONConfig": "methods.variational.ivon",
    "LaplaceConfig": "methods.laplace.laplace",
    "MAPConfig": "methods.averaging.map",
    "MCDropoutConfig": "methods.averaging.mc_dropout",
    "EKFConfig": "methods.variational.ekf",
    "FullRankVIConfig": "methods.variational.full_rank_vi",
    "LowRankVIConfig": "methods.variational.low_rank_vi",
    "MeanFieldConfig": "methods.variational.mean_field",
    "MetropolisConfig": "methods.mcmc.metropolis",
    "PenaltyConfig": "methods.mcmc.penalty",
    "Posterior": "posteriors.posterior",
    "SGDMCConfig": "methods.averaging.sgd_mc",
    "SGHMCConfig": "methods.sgmcmc.sghmc",
    "SGHMCEulerConfig": "methods.sgmcmc.sghmc_euler",
    "SGLDConfig": "methods.sgmcmc.sgld",
    "SGNHTConfig": "methods.sgmcmc.sgnht",
    "SWAConfig": "methods.averaging.swa",
    "SWAGConfig": "methods.averaging.swag",
    "SnapshotConfig": "methods.averaging.snapshot",
    "TrainingFreeConfig": "methods.variational.training_free",
    "UncertaintyStreamer": "pipelines.records",
    "attach": "models.attaching",
    "cross_fit_calibration": "training.cross_fitting",
    "curvature_of_function": "fit.function_curvature",
    "curvature_of_model": "fit.model_curvature",
    "decompose": "uncertainty.decomposition",
    "distil": "fit.distil",
    "fit_calibration": "fit.calibration",
    "fit_layer_factors": "fit.single_pass",
    "fit_variance_factor": "fit.single_pass",
    "fit_laplace": "fit.laplace",
    "fit_mc_dropout": "fit.mc_dropout",
    "fit_swag": "fit.swag",
    "fit_training_free": "fit.training_free",
    "mixture": "uncertainty.decomposition",
    "outputs_of": "fit.function_curvature",
    "pipeline": "pipelines.factory",
    "print_record": "pipelines.rendering",
    "prior_predictive": "fit.prior_predictive",
    "push_directory": "posteriors.hub",
    "row_gradients_of_function": "fit.function_curvature",
    "row_gradients_of_model": "fit.model_curvature",
    "sample": "chains.sampling",
    "to_html": "pipelines.rendering",
    "to_terminal": "pipelines.rendering",
    "tune": "training.tuning.tune",
}
"""Public name -> module. A module is imported when its name is first used: the mathematics needs no transformers."""

__all__ = [
    "METHODS",
    "AGPSConfig",
    "BAOABConfig",
    "BLoBConfig",
    "BayesianModelForAudioClassification",
    "BayesianModelForCausalLM",
    "BayesianModelForImageClassification",
    "BayesianModelForImageTextToText",
    "BayesianModelForSequenceClassification",
    "BayesianModelForTokenClassification",
    "BayesianTrainer",
    "BayesianTrainerMixin",
    "BayesianTrainingArguments",
    "BradleyTerry",
    "ClassLogProbs",
    "CustomLikelihood",
    "DirectPreferences",
    "EKFConfig",
    "EnsembleConfig",
    "FullRankVIConfig",
    "GPSConfig",
    "HMCConfig",
    "Heteroscedastic",
    "IVONConfig",
    "LaplaceConfig",
    "LowRankVIConfig",
    "MAPConfig",
    "MCDropoutConfig",
    "MeanFieldConfig",
    "MetropolisConfig",
    "MixtureDensity",
    "Moments",
    "Ordinal",
    "PenaltyConfig",
    "Poisson",
    "Posterior",
    "SGDMCConfig",
    "SGHMCConfig",
    "SGHMCEulerConfig",
    "SGLDConfig",
    "SGNHTConfig",
    "SWAConfig",
    "SWAGConfig",
    "SnapshotConfig",
    "TrainingFreeConfig",
    "UncertaintyStreamer",
    "Weighted",
    "attach",
    "cross_fit_calibration",
    "curvature_of_function",
    "curvature_of_model",
    "decompose",
    "distil",
    "fit_calibration",
    "fit_laplace",
    "fit_layer_factors",
    "fit_mc_dropout",
    "fit_swag",
    "fit_training_free",
    "fit_variance_factor",
    "mixture",
    "outputs_of",
    "pipeline",
    "print_record",
    "prior_predictive",
    "push_directory",
    "register_likelihood",
    "row_gradients_of_function",
    "row_gradients_of_model",
    "sample",
    "to_html",
    "to_terminal",
    "tune",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'hf_bayes' has no attribute {name!r}")
    return getattr(importlib.import_module(f"hf_bayes.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


register_when_loaded()
