"""Several labels for one input, each present or absent: their likelihood, and their uncertainties in nats.

The labels of one member are independent, each with a Bernoulli likelihood. p_mc is the probability that member m
gives to label c, q_c = mean_m p_mc, and h(p) = -p log p - (1 - p) log(1 - p):

    total = sum_c h(q_c),   aleatoric = sum_c mean_m h(p_mc),   epistemic = total - aleatoric = sum_c I(y_c; theta).

Each label is a choice between the logits 0 and z_c, and its uncertainties are those of ``decomposition``. The
aleatoric part is the entropy of all labels given theta, because they are independent. The labels of the mixture depend
on each other through theta. The sums leave this out: total and epistemic are upper bounds of the entropy
H(y_1, ..., y_C) and of the mutual information I(y_1, ..., y_C; theta). Both would need a sum over 2^C sets of labels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_bayes.uncertainty.decomposition import Uncertainty, decompose
from hf_bayes.uncertainty.likelihoods import IGNORE, Likelihood, widened


@dataclass(frozen=True)
class Bernoulli(Likelihood):
    """The Bernoulli likelihood of independent binary labels [..., C] in {0, 1}; an example is one term."""

    def log_prob(self, logits: Tensor, labels: Tensor) -> Tensor:
        return self.log_prob_parts(logits, labels).sum(-1)

    def log_prob_parts(self, logits: Tensor, labels: Tensor) -> Tensor:
        logits = widened(logits)
        return -F.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype), reduction="none")

    def max_log_prob(self, num_outputs: int) -> float:
        return 0.0

    def label_shapes(self, logits_shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        return (logits_shape,)

    def outside(self, labels: Tensor, num_outputs: int) -> Tensor:
        # for labels outside [0, 1] the cross entropy has no lower bound, so exp(-U) is not a density
        return ~((labels >= 0) & (labels <= 1))

    def support(self, num_outputs: int) -> str:
        return f"0 to 1 ({IGNORE} has no meaning among several labels)"

    def score(self, logits: Tensor, labels: Tensor) -> Tensor:
        return labels.to(widened(logits).dtype) - widened(logits).sigmoid()

    def draw(self, logits: Tensor, uniforms: Tensor) -> Tensor:
        return (uniforms < widened(logits).sigmoid()).to(widened(logits).dtype)

    def fisher_root(self, logits: Tensor, column: int) -> Tensor:
        probs = widened(logits).sigmoid()[:, column]
        root = torch.zeros_like(widened(logits))
        root[:, column] = (probs * (1 - probs)).sqrt()
        return root


def two_classes(logits: Tensor) -> Tensor:
    """Return [..., C, 2] logits of the classes "absent" and "present" from the logits [..., C] of C labels."""
    return torch.stack([torch.zeros_like(logits), logits], -1)


def summed(parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the uncertainties [...] of all labels together from those of each label [..., C].

    Args:
        parts: ``total``, and ``aleatoric`` and ``epistemic`` if they are defined.
    """
    found = {name: value.sum(-1) for name, value in parts.items()}
    if "epistemic" in found:
        found["total"] = found["aleatoric"] + found["epistemic"]  # the identity holds exactly
    return found


def decompose_labels(logits: Tensor) -> Uncertainty:
    """Return the three uncertainties [...] of C labels.

    Args:
        logits: [M, ..., C] logits of M members, one for each label.
    Raises:
        ValueError: if a logit is not finite.
    """
    return Uncertainty(**summed(decompose(two_classes(logits))._asdict()))
