"""One temperature for the mixture of a posterior's members, and what it makes of the uncertainties.

Members are averaged first, and the mixture q is then sharpened or flattened as a whole:

    q_t(y) = q(y)^(1 / t) / sum_c q(c)^(1 / t).

This is temperature scaling (Guo et al. 2017) of the predictive distribution. t < 1 makes it more confident, which
posteriors at T = 1 often need. The ranking of classes does not change. The total uncertainty becomes H[q_t]. The
epistemic uncertainty keeps its share in the total,

    EU_t / TU_t = EU / TU,

because the share says how far members disagree, which a temperature does not change. The temperature t has nothing to
do with T, the temperature of the posterior. ``metrics.calibration`` fits it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hf_bayes.uncertainty.decomposition import Prediction, Uncertainty

INVERSE_TEMPERATURES = torch.logspace(-1, 1, 15, base=8, dtype=torch.float64)
"""[G] The values of 1 / t, from 1/8 to 8, at which ``nll_at_temperatures`` computes the NLL."""


def temper_log_probs(log_probs: Tensor, temperature: float) -> Tensor:
    """Return the [..., C] log of q_t from the log of q; -inf stays -inf."""
    return log_probs if temperature == 1 else (log_probs / temperature).log_softmax(-1)


def temper_uncertainties(log_probs: Tensor, total: Tensor, parts: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the uncertainties at the temperature of a mixture.

    Args:
        log_probs: [..., C] the log of q_t.
        total: [...] H[q].
        parts: ``total``, and ``aleatoric`` and ``epistemic`` if they are defined.
    """
    tempered = -torch.where(log_probs > -math.inf, log_probs.exp() * log_probs, 0.0).sum(-1)
    found = {"total": tempered}
    if "epistemic" in parts:
        # where q is certain both entropies are 0, and so is what members disagree about
        share = torch.where(total > 0, parts["epistemic"] / total, 0.0).clamp(max=1)
        found["epistemic"] = share * tempered
        found["aleatoric"] = tempered - found["epistemic"]
        found["total"] = found["aleatoric"] + found["epistemic"]  # the identity holds exactly
    return found


@torch.no_grad()
def temper(prediction: Prediction, temperature: float) -> Prediction:
    """Return the prediction at the temperature of the mixture."""
    if temperature == 1:
        return prediction
    log_probs = temper_log_probs(prediction.log_probs, temperature)
    parts = temper_uncertainties(log_probs, prediction.uncertainty.total, prediction.uncertainty._asdict())
    return Prediction(log_probs, Uncertainty(parts["total"], parts["aleatoric"], parts["epistemic"]))


@torch.no_grad()
def nll_at_temperatures(log_probs: Tensor, labels: Tensor) -> Tensor:
    """Return [n, G, 3]: the NLL in nats and its first two derivatives in b = 1 / t, at ``INVERSE_TEMPERATURES``.

    NLL(b) = log sum_c q(c)^b - b log q(label), d = E_b[log q] - log q(label), d^2 = Var_b[log q].

    Args:
        log_probs: [n, C] the log of q.
        labels: [n] classes.
    """
    chosen = log_probs.gather(-1, labels[:, None].long())[:, 0].double()
    values = []
    for b in INVERSE_TEMPERATURES.tolist():
        scaled = log_probs * b
        norm = scaled.logsumexp(-1)
        probs = (scaled - norm[:, None]).exp()
        finite = torch.where(probs > 0, log_probs, 0.0)
        mean = (probs * finite).sum(-1)
        variance = (probs * (finite - mean[:, None]).square()).sum(-1)
        values.append(torch.stack([norm.double() - b * chosen, mean.double() - chosen, variance.double()], -1))
    return torch.stack(values, 1)
