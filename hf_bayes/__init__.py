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
    from hf_bayes import metrics
    from hf_bayes.chains.sampling import sample
    from hf_bayes.cli.scripts import end_process_group
    from hf_bayes.decide.abstention import fit_abstention, with_abstention
    from hf_bayes.decide.acquisition import acquire
    from hf_bayes.decide.answers import answer_uncertainty, p_true
    from hf_bayes.decide.equivalence import entails_both_ways, similar_embeddings
    from hf_bayes.decide.prediction_sets import fit_prediction_sets
    from hf_bayes.decide.rewards import RewardModel
    from hf_bayes.decide.semantic_entropy import answers_of_members, semantic_entropy
    from hf_bayes.decide.threshold import fit_threshold
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
    from hf_bayes.methods.assembly import rate_factor
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
    from hf_bayes.models.single_pass.sequential import sequential_outputs
    from hf_bayes.models.statistics import with_batch_norm_statistics
    from hf_bayes.models.to_posterior import to_posterior
    from hf_bayes.models.token_classification import BayesianModelForTokenClassification
    from hf_bayes.objectives.data_access import DataAccess
    from hf_bayes.objectives.starting import scale_of, start_run
    from hf_bayes.pipelines.factory import pipeline
    from hf_bayes.pipelines.polygraph import polygraph_stats
    from hf_bayes.pipelines.records import UncertaintyStreamer
    from hf_bayes.pipelines.rendering import print_record, to_html, to_terminal
    from hf_bayes.pipelines.uqlm import logprobs_results, member_logprobs_results
    from hf_bayes.posteriors.hub import push_directory
    from hf_bayes.posteriors.posterior import Posterior
    from hf_bayes.posteriors.sidecars import Sidecars
    from hf_bayes.training.arguments import BayesianTrainingArguments
    from hf_bayes.training.cross_fitting import cross_fit_calibration
    from hf_bayes.training.reports.monitor import Monitor
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
    from hf_bayes.uncertainty.gaussian_links import LINKS
    from hf_bayes.uncertainty.likelihoods import Categorical, Normal
    from hf_bayes.uncertainty.several_labels import Bernoulli

_MODULES = {
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
    "Bernoulli": "uncertainty.several_labels",
    "BradleyTerry": "uncertainty.custom.bradley_terry",
    "Categorical": "uncertainty.likelihoods",
    "ClassLogProbs": "uncertainty.custom.base",
    "CustomLikelihood": "uncertainty.custom.base",
    "DataAccess": "objectives.data_access",
    "DirectPreferences": "uncertainty.custom.direct_preferences",
    "EKFConfig": "methods.variational.ekf",
    "EnsembleConfig": "methods.averaging.ensemble",
    "FullRankVIConfig": "methods.variational.full_rank_vi",
    "GPSConfig": "methods.mcmc.gps",
    "HMCConfig": "methods.mcmc.hmc",
    "Heteroscedastic": "uncertainty.custom.heteroscedastic",
    "IVONConfig": "methods.variational.ivon",
    "LINKS": "uncertainty.gaussian_links",
    "LaplaceConfig": "methods.laplace.laplace",
    "LowRankVIConfig": "methods.variational.low_rank_vi",
    "MAPConfig": "methods.averaging.map",
    "MCDropoutConfig": "methods.averaging.mc_dropout",
    "METHODS": "methods.registry",
    "MeanFieldConfig": "methods.variational.mean_field",
    "MetropolisConfig": "methods.mcmc.metropolis",
    "MixtureDensity": "uncertainty.custom.mixture_density",
    "Moments": "uncertainty.custom.base",
    "Monitor": "training.reports.monitor",
    "Normal": "uncertainty.likelihoods",
    "Ordinal": "uncertainty.custom.ordinal",
    "PenaltyConfig": "methods.mcmc.penalty",
    "Poisson": "uncertainty.custom.poisson",
    "Posterior": "posteriors.posterior",
    "RewardModel": "decide.rewards",
    "SGDMCConfig": "methods.averaging.sgd_mc",
    "SGHMCConfig": "methods.sgmcmc.sghmc",
    "SGHMCEulerConfig": "methods.sgmcmc.sghmc_euler",
    "SGLDConfig": "methods.sgmcmc.sgld",
    "SGNHTConfig": "methods.sgmcmc.sgnht",
    "SWAConfig": "methods.averaging.swa",
    "SWAGConfig": "methods.averaging.swag",
    "Sidecars": "posteriors.sidecars",
    "SnapshotConfig": "methods.averaging.snapshot",
    "TrainingFreeConfig": "methods.variational.training_free",
    "UncertaintyStreamer": "pipelines.records",
    "Weighted": "uncertainty.custom.weighted",
    "acquire": "decide.acquisition",
    "answer_uncertainty": "decide.answers",
    "answers_of_members": "decide.semantic_entropy",
    "attach": "models.attaching",
    "cross_fit_calibration": "training.cross_fitting",
    "curvature_of_function": "fit.function_curvature",
    "curvature_of_model": "fit.model_curvature",
    "decompose": "uncertainty.decomposition",
    "distil": "fit.distil",
    "end_process_group": "cli.scripts",
    "entails_both_ways": "decide.equivalence",
    "fit_abstention": "decide.abstention",
    "fit_calibration": "fit.calibration",
    "fit_laplace": "fit.laplace",
    "fit_layer_factors": "fit.single_pass",
    "fit_mc_dropout": "fit.mc_dropout",
    "fit_prediction_sets": "decide.prediction_sets",
    "fit_swag": "fit.swag",
    "fit_threshold": "decide.threshold",
    "fit_training_free": "fit.training_free",
    "fit_variance_factor": "fit.single_pass",
    "logprobs_results": "pipelines.uqlm",
    "member_logprobs_results": "pipelines.uqlm",
    "mixture": "uncertainty.decomposition",
    "outputs_of": "fit.function_curvature",
    "p_true": "decide.answers",
    "pipeline": "pipelines.factory",
    "polygraph_stats": "pipelines.polygraph",
    "print_record": "pipelines.rendering",
    "prior_predictive": "fit.prior_predictive",
    "push_directory": "posteriors.hub",
    "rate_factor": "methods.assembly",
    "register_likelihood": "uncertainty.custom.registry",
    "row_gradients_of_function": "fit.function_curvature",
    "row_gradients_of_model": "fit.model_curvature",
    "sample": "chains.sampling",
    "scale_of": "objectives.starting",
    "semantic_entropy": "decide.semantic_entropy",
    "sequential_outputs": "models.single_pass.sequential",
    "similar_embeddings": "decide.equivalence",
    "start_run": "objectives.starting",
    "to_html": "pipelines.rendering",
    "to_posterior": "models.to_posterior",
    "to_terminal": "pipelines.rendering",
    "tune": "training.tuning.tune",
    "with_abstention": "decide.abstention",
    "with_batch_norm_statistics": "models.statistics",
}
"""Public name -> module. A module is imported when its name is first used: the mathematics needs no transformers."""

__all__ = [
    "LINKS",
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
    "Bernoulli",
    "BradleyTerry",
    "Categorical",
    "ClassLogProbs",
    "CustomLikelihood",
    "DataAccess",
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
    "Monitor",
    "Normal",
    "Ordinal",
    "PenaltyConfig",
    "Poisson",
    "Posterior",
    "RewardModel",
    "SGDMCConfig",
    "SGHMCConfig",
    "SGHMCEulerConfig",
    "SGLDConfig",
    "SGNHTConfig",
    "SWAConfig",
    "SWAGConfig",
    "Sidecars",
    "SnapshotConfig",
    "TrainingFreeConfig",
    "UncertaintyStreamer",
    "Weighted",
    "acquire",
    "answer_uncertainty",
    "answers_of_members",
    "attach",
    "cross_fit_calibration",
    "curvature_of_function",
    "curvature_of_model",
    "decompose",
    "distil",
    "end_process_group",
    "entails_both_ways",
    "fit_abstention",
    "fit_calibration",
    "fit_laplace",
    "fit_layer_factors",
    "fit_mc_dropout",
    "fit_prediction_sets",
    "fit_swag",
    "fit_threshold",
    "fit_training_free",
    "fit_variance_factor",
    "logprobs_results",
    "member_logprobs_results",
    "metrics",
    "mixture",
    "outputs_of",
    "p_true",
    "pipeline",
    "polygraph_stats",
    "print_record",
    "prior_predictive",
    "push_directory",
    "rate_factor",
    "register_likelihood",
    "row_gradients_of_function",
    "row_gradients_of_model",
    "sample",
    "scale_of",
    "semantic_entropy",
    "sequential_outputs",
    "similar_embeddings",
    "start_run",
    "to_html",
    "to_posterior",
    "to_terminal",
    "tune",
    "with_abstention",
    "with_batch_norm_statistics",
]


def __getattr__(name: str) -> Any:
    if name == "metrics":  # the one subpackage among the public names
        return importlib.import_module("hf_bayes.metrics")
    if name not in _MODULES:
        raise AttributeError(f"module 'hf_bayes' has no attribute {name!r}")
    return getattr(importlib.import_module(f"hf_bayes.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


register_when_loaded()
