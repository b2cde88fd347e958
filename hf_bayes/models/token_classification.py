"""Models that give each token of a text a label."""

from __future__ import annotations

from transformers import AutoModelForTokenClassification

from hf_bayes.models.classification import BayesianClassifier, refuse_noise_std
from hf_bayes.models.refusals import refuse_likelihood
from hf_bayes.uncertainty.custom.base import LikelihoodConfig
from hf_bayes.uncertainty.likelihoods import Categorical, Likelihood


class BayesianModelForTokenClassification(BayesianClassifier):
    """M taggers as one model: ``logits`` [B, T, C], and ``labels`` [B, T] without a causal shift, -100 for none."""

    task = "token_classification"
    auto_class = AutoModelForTokenClassification

    def _choose_likelihood(self, noise_std: float | None) -> Likelihood:
        """Return the likelihood of classes for any ``problem_type``: these heads of transformers have no other loss."""
        refuse_noise_std(noise_std, "a token classification head")
        return Categorical()

    def _build_likelihood(self, config: LikelihoodConfig, noise_std: float | None) -> Likelihood:
        """Raise: a label of a token is a class."""
        refuse_likelihood(config, "a token classification head")
        raise AssertionError("a likelihood was given")
