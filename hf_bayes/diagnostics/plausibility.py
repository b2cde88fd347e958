"""Check that chains stayed where prior and data allow. Energies are in nats on the full data set."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_bayes.core.types import Prior

MAX_STRAYED = 10.0
"""Times the nats that can be accounted for: a chain ten times as hot as it should be loses fewer."""


def has_strayed(ratio: float | None) -> bool:
    """Return whether a chain's ``strayed`` is beyond any law; None stands for infinity, as in saved figures."""
    return ratio is None or ratio > MAX_STRAYED


def strayed(
    prior: Prior, draws: Tensor, start: Tensor, *, data_nats: float, temperature: float, prior_weight: float
) -> Tensor | None:
    """Return, per chain, the nats of prior density that its farthest draw lost, over those that can be accounted for.

    A chain at temperature T has an energy U_lik + w U_prior of about d T above the least one, and the start has no less
    than that. So U_prior(theta) - U_prior(start) is about (U_lik(start) - min U_lik + d T) / w at most. Optimisers are
    granted the spread of one prior draw, d nats.

    Args:
        prior: log p(theta).
        draws: [M, S, d] of M chains.
        start: [d], the weights that the run began with.
        data_nats: U_lik(start) - min U_lik, all that the data can repay.
        temperature: T.
        prior_weight: w, see ``MethodConfig.prior_weight``.
    Returns:
        [M] float64; infinite where a draw is not finite. None where the prior has no weight and bounds nothing.
    """
    if prior_weight == 0:
        return None
    allowed = (max(data_nats, 0.0) + start.numel() * max(temperature, prior_weight)) / prior_weight
    before = prior.log_prob(start[None]).double()
    lost = torch.stack([before - prior.log_prob(theta.to(start)).double() for theta in draws.unbind(1)])
    return lost.nan_to_num(nan=torch.inf, posinf=torch.inf).clamp_min(0).amax(0) / allowed
