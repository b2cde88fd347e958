"""Distances of chains from their start, in units of the prior: did they move, and are they still in plausible regions?

Energies are in nats on the full data set.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_bayes.core.types import Prior

MAX_PRIOR_LOSS_RATIO = 10.0
"""The largest plausible ``prior_loss_ratio``: even a chain at ten times its temperature stays below it."""


def distance_moved(theta: Tensor, theta0: Tensor, prior_std: Tensor | float) -> Tensor:
    """Return the root mean square over coordinates of (theta - theta0) / prior_std, [M, d] -> [M].

    Args:
        theta: [M, d].
        theta0: [M, d], the start of each chain.
        prior_std: broadcasts to [M, d].
    """
    widths = torch.as_tensor(prior_std, device=theta.device).expand_as(theta)
    each = zip(theta, theta0, widths, strict=True)  # a chain at a time: theta may fill a third of a GPU's memory
    return torch.stack([((row - start) / width).square().mean().sqrt() for row, start, width in each])


def is_implausible(ratio: float | None) -> bool:
    """Check whether the ``prior_loss_ratio`` of a chain is implausible. None stands for infinity, as in saved files."""
    return ratio is None or ratio > MAX_PRIOR_LOSS_RATIO


def prior_loss_ratio(
    prior: Prior, draws: Tensor, start: Tensor, *, data_nats: float, temperature: float, prior_weight: float
) -> Tensor | None:
    """Return, per chain, the largest loss of prior log-density over its draws, divided by the largest plausible loss.

    A chain at temperature T has an energy U_lik + w U_prior of about d T above the minimum, and the energy of the start
    is at least the minimum. So U_prior(theta) - U_prior(start) is at most about
    (U_lik(start) - min U_lik + d T) / w. Optimisers (T = 0) are allowed the energy of one prior draw, d nats.

    Args:
        prior: log p(theta).
        draws: [M, S, d] draws of M chains.
        start: [d], the weights at the start of the run.
        data_nats: U_lik(start) - min U_lik, the largest loss that the data can compensate.
        temperature: T.
        prior_weight: w, see ``MethodConfig.prior_weight``.
    Returns:
        [M] float64; infinite where a draw is not finite. None if the prior has no weight, because then it sets no
        bound.
    """
    if prior_weight == 0:
        return None
    allowed = (max(data_nats, 0.0) + start.numel() * max(temperature, prior_weight)) / prior_weight
    before = prior.log_prob(start[None]).double()
    found = [[prior.log_prob(row[None].to(start)).double() for row in of_chain] for of_chain in draws]
    lost = before - torch.stack([torch.cat(of_chain) for of_chain in found])
    return lost.nan_to_num(nan=torch.inf, posinf=torch.inf).clamp_min(0).amax(1) / allowed
