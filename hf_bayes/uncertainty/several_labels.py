"""Total, aleatoric and epistemic uncertainty of several labels for one input, each present or absent, in nats.

p_mc is the probability that member m gives to label c, q_c = mean_m p_mc, and h(p) = -p log p - (1 - p) log(1 - p):

    total = sum_c h(q_c),   aleatoric = sum_c mean_m h(p_mc),   epistemic = total - aleatoric = sum_c I(y_c; theta).

Each label is a choice between the logits 0 and z_c, and its uncertainties are those of ``decomposition``. The labels of
one member are independent, so the aleatoric part is the entropy of all labels given theta. The labels of the mixture
depend on each other through theta. The sums leave this out: total and epistemic are upper bounds of the entropy
H(y_1, ..., y_C) and of the mutual information I(y_1, ..., y_C; theta). Both would need a sum over 2^C sets of labels.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hf_bayes.uncertainty.decomposition import Uncertainty, decompose


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
