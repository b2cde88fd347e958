"""Probabilities and uncertainties of words with Gaussian logits z ~ N(m, S), where no pair of words is ever formed.

Expansions to second order at p = softmax(m), with the variance w_k = Var[z_k - p . z] of each word's relative logit:

    E softmax(z)_k = p_k (1 + (w_k - p . w) / 2),
    I(y; z) = E KL(softmax(z) || E softmax(z)) = tr(F S) / 2 = p . w / 2,   F = diag(p) - p p'.

Both need S only through its diagonal and the product S p. The first is limited to positive probabilities. The second
grows without bound, while I < H[q], so that H[q] (1 - exp(-I / H[q])) is used. For 2,000 words the centred probit of
``gaussian_links`` is several times further from Monte Carlo (in KL), and the Laplace bridge loses most of the epistemic
uncertainty, because one concentration cannot fit the few words that matter and all others.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_bayes.models.predictives.built_in import ClassPredictive
from hf_bayes.uncertainty.decomposition import Prediction, Uncertainty
from hf_bayes.uncertainty.likelihoods import Likelihood
from hf_bayes.uncertainty.mixture_temperature import temper

SMALLEST = 0.1
"""The least factor by which a probability is multiplied, where the expansion would make it negative."""


def word_prediction(mean: Tensor, variance: Tensor, product: Tensor, probs: Tensor) -> Prediction:
    """Return the prediction for Gaussian logits of words.

    Args:
        mean: [n, V] m.
        variance: [n, V], the diagonal of S.
        product: [n, V] S p.
        probs: [n, V] p = softmax(m).
    """
    shared = (probs * product).sum(-1, keepdim=True)
    relative = (variance - 2 * product + shared).clamp_min(0)
    average = (probs * relative).sum(-1, keepdim=True)
    shift = (1 + 0.5 * (relative - average)).clamp_min(SMALLEST).log()
    log_probs = (mean.log_softmax(-1) + shift).log_softmax(-1)
    total = -torch.where(log_probs > -torch.inf, log_probs.exp() * log_probs, 0.0).sum(-1)
    information = 0.5 * average[..., 0]
    epistemic = torch.where(total > 0, -total * torch.expm1(-information / total), 0.0)
    aleatoric = total - epistemic
    return Prediction(log_probs, Uncertainty(aleatoric + epistemic, aleatoric, epistemic))


class GaussianWords(ClassPredictive):
    """The next word, with Gaussian logits, at the temperature of the mixture.

    The prediction takes the place of the mixture of members, and is its own only member.
    """

    def __init__(self, prediction: Prediction, likelihood: Likelihood, temperature: float = 1.0) -> None:
        found = temper(prediction, temperature)
        super().__init__(found.log_probs, found.uncertainty._asdict(), likelihood, temperature)
        self.members = found, found.log_probs[None]
