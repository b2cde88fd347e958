"""Estimators of the curvature of -log p(D | theta), as sums of outer products of backpropagated vectors.

An estimator defines cotangents c_k of the logits, for every likelihood term. One backward pass with such a
cotangent is one vector-Jacobian product (VJP). VJP k of a row (an example, a sequence) is g_k = sum_terms J_term' c_k,
and H = sum_rows sum_k g_k g_k'. With p the model's distribution at a term:

    ggn          c ~ p: the score at a label that the model draws (Monte Carlo, Kunstner et al. 2019), or with
                 num_samples=None each column of a root of the term's Fisher information (exact; C - 1 columns for C
                 classes, whose probabilities have one degree of freedom less)
    ef_sequence  the score at the data's label: H = sum_rows (grad of the row's log-likelihood)(...)'
    ef_token     H = sum_terms (grad of the term's log-likelihood)(...)': random signs on the terms, since
                 E (sum_t s_t g_t)(sum_t s_t g_t)' = sum_t g_t g_t', or with num_samples=None one VJP per term

A row of weight w has w log p in place of log p. Its score has the factor w, and its outer product must have the factor
w, too, as w copies of the row have. So the empirical Fisher matrices divide the score by sqrt(w).

For categorical, Bernoulli and Gaussian likelihoods in their natural parameters the GGN is the conditional Fisher matrix
(posteriors app. A.1; Martens 2020). Scores at the model's own labels are independent over terms and have mean zero, so
the terms of a row share a backward pass there, too. The Hessian is not a sum of outer products: the curvature pass
computes it separately.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from hf_bayes.uncertainty.likelihoods import Likelihood

ESTIMATORS = ("ggn", "ef_sequence", "ef_token", "hessian")


class Terms(NamedTuple):
    """The data of n likelihood terms.

    Attributes:
        logits: [n, C].
        labels: [n] or [n, C].
        ordinals: [n] the place of each term within its row, from 0.
        uniforms: [S, n] or [S, n, C] on [0, 1), one set for each sample.
    """

    logits: Tensor
    labels: Tensor
    ordinals: Tensor
    uniforms: Tensor


class Estimator(Protocol):
    """An estimator, which defines cotangents of the logits."""

    @property
    def num_draws(self) -> int:
        """S, the number of sets of uniforms that ``cotangent`` needs."""
        ...

    def num_vjps(self, likelihood: Likelihood, num_outputs: int, num_ordinals: int) -> int:
        """Return the number of VJPs for rows of at most ``num_ordinals`` terms."""
        ...

    def cotangent(self, vjp: int, terms: Terms, likelihood: Likelihood) -> Tensor:
        """Return the cotangents [n, C] of VJP number ``vjp``."""
        ...


@dataclass(frozen=True)
class EmpiricalFisherOfRows:
    """The empirical Fisher matrix per sequence: one VJP."""

    num_draws: int = 0

    def num_vjps(self, likelihood: Likelihood, num_outputs: int, num_ordinals: int) -> int:
        return 1

    def cotangent(self, vjp: int, terms: Terms, likelihood: Likelihood) -> Tensor:
        return _score_of_data(terms, likelihood)


@dataclass(frozen=True)
class SignedEmpiricalFisher:
    """The empirical Fisher matrix per token, by random signs."""

    num_draws: int

    def num_vjps(self, likelihood: Likelihood, num_outputs: int, num_ordinals: int) -> int:
        return self.num_draws

    def cotangent(self, vjp: int, terms: Terms, likelihood: Likelihood) -> Tensor:
        uniforms = terms.uniforms[vjp].flatten(1)[:, :1] if terms.uniforms.ndim == 3 else terms.uniforms[vjp][:, None]
        signs = torch.where(uniforms < 0.5, -1.0, 1.0)
        score = _score_of_data(terms, likelihood)
        return score * signs.to(score.dtype) / math.sqrt(self.num_draws)


@dataclass(frozen=True)
class EmpiricalFisherOfTerms:
    """The empirical Fisher matrix per token, with one VJP for each term of a row."""

    num_draws: int = 0

    def num_vjps(self, likelihood: Likelihood, num_outputs: int, num_ordinals: int) -> int:
        return num_ordinals

    def cotangent(self, vjp: int, terms: Terms, likelihood: Likelihood) -> Tensor:
        score = _score_of_data(terms, likelihood)
        return score * (terms.ordinals == vjp).to(score.dtype)[:, None]


@dataclass(frozen=True)
class SampledGGN:
    """The GGN from labels that the model draws."""

    num_draws: int

    def num_vjps(self, likelihood: Likelihood, num_outputs: int, num_ordinals: int) -> int:
        return self.num_draws

    def cotangent(self, vjp: int, terms: Terms, likelihood: Likelihood) -> Tensor:
        labels = likelihood.draw(terms.logits, terms.uniforms[vjp])
        return likelihood.score(terms.logits, labels) / math.sqrt(self.num_draws)


@dataclass(frozen=True)
class ExactGGN:
    """The exact GGN: one VJP for each column of a root of the Fisher information of each term of a row."""

    num_draws: int = 0

    def num_vjps(self, likelihood: Likelihood, num_outputs: int, num_ordinals: int) -> int:
        return likelihood.num_root_columns(num_outputs) * num_ordinals

    def cotangent(self, vjp: int, terms: Terms, likelihood: Likelihood) -> Tensor:
        ordinal, column = divmod(vjp, likelihood.num_root_columns(terms.logits.shape[-1]))
        root = likelihood.fisher_root(terms.logits, column)
        return root * (terms.ordinals == ordinal).to(root.dtype)[:, None]


def _score_of_data(terms: Terms, likelihood: Likelihood) -> Tensor:
    """Return [n, C]: the scores at the data's labels, each divided by the root of its weight."""
    score, weights = likelihood.score(terms.logits, terms.labels), likelihood.weights(terms.labels)
    if weights is None:
        return score
    return score * weights.masked_fill(weights == 0, 1).rsqrt().to(score.dtype)[:, None]  # a score of weight 0 is 0


def build_estimator(name: str, num_samples: int | None) -> Estimator:
    """Return the estimator with this name.

    Raises:
        ValueError: for the Hessian, which has no VJPs, and for an unknown name.
    """
    if name == "ggn":
        return ExactGGN() if num_samples is None else SampledGGN(num_samples)
    if name == "ef_token":
        return EmpiricalFisherOfTerms() if num_samples is None else SignedEmpiricalFisher(num_samples)
    if name == "ef_sequence":
        return EmpiricalFisherOfRows()
    raise ValueError(f"an estimator of outer products must be one of ggn, ef_sequence, ef_token, got {name!r}")
