"""Models that give each token of a text a label."""

from __future__ import annotations

from transformers import AutoModelForTokenClassification

from hf_bayes.models.classification import BayesianClassifier, refuse_noise_std
from hf_bayes.uncertainty.likelihoods import Categorical, Likelihood


class BayesianModelForTokenClassification(BayesianClassifier):
    """M taggers as one: ``logits`` [B, T, C] answer ``labels`` [B, T], -100 for none. No causal shift."""

    task = "token_classification"
    auto_class = AutoModelForTokenClassification

    def _choose_likelihood(self, noise_std: float | None) -> Likelihood:
        """Classes, whatever ``problem_type`` says: transformers' heads of this kind know no other loss."""
        refuse_noise_std(noise_std, "a token classification head")
        return Categorical()
