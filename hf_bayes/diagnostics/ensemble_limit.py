"""The limit of infinitely many ensemble members, extrapolated from the members at hand (cold_posteriors app. F)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

MIN_MEMBERS = 8
"""The smallest number of members that determines three coefficients and their error."""


@dataclass(frozen=True)
class RiskAsymptote:
    """The fit C(S) = C(inf) + a_1 / S + a_2 / S^2 (cold_posteriors eq. 34), C(S) being the mean NLL of S members.

    Attributes:
        sizes: S = 1, ..., M.
        risks: C(S), nats per term, a mean over subsets of the members.
        limit: C(inf).
        slope, curvature: a_1, a_2.
        std_error: standard error of the limit, from leaving out one chain at a time. If there are too few chains, one
            member is left out at a time.
    """

    sizes: list[int]
    risks: list[float]
    limit: float
    slope: float
    curvature: float
    std_error: float

    def at(self, risk: float) -> RiskAsymptote:
        """Return the same curve, shifted so that all members together have the risk ``risk``."""
        offset = risk - self.risks[-1]
        risks = [value + offset for value in self.risks]
        return replace(self, risks=risks, limit=self.limit + offset)


def risk_asymptote(log_lik: Tensor, chain: Sequence[int]) -> RiskAsymptote | None:
    """Extrapolate to infinitely many members (cold_posteriors app. F) by a least squares fit to C(S) for S >= M / 4.

    The paper fits S >= 20. C(S) is the risk of the first S members together, averaged over 16 random orders of the
    members. The orders stay the same when a member is left out.

    Args:
        log_lik: [n, P, M] log-likelihoods of the P parts of n terms under each member. Each part has a mixture of its
            own (``Likelihood.log_prob_parts``).
        chain: [M] the chain of each member.
    Returns:
        The fit. None for fewer than ``MIN_MEMBERS`` members, or if a label has probability 0 under all members.
    """
    count = log_lik.shape[-1]
    if count < MIN_MEMBERS:
        return None
    log_lik = log_lik.double()
    generator = torch.Generator().manual_seed(0)
    orders = torch.stack([torch.randperm(count, generator=generator) for _ in range(16)])
    risks = _risks(log_lik, orders)
    if not bool(risks.isfinite().all()):
        return None
    limit, slope, curvature = _fit(risks).tolist()
    groups = torch.tensor(chain)
    if len(set(groups.tolist())) < MIN_MEMBERS // 2:
        groups = torch.arange(count)  # too few chains to leave one out
    labels = sorted(set(groups.tolist()))
    left_out = torch.stack([_fit(_risks(log_lik, _without(orders, groups == label)))[0] for label in labels])
    variance = (len(labels) - 1) / len(labels) * (left_out - left_out.mean()).square().sum()
    sizes = list(range(1, count + 1))
    return RiskAsymptote(sizes, risks.tolist(), limit, slope, curvature, math.sqrt(float(variance)))


def _risks(log_lik: Tensor, orders: Tensor) -> Tensor:
    """Return C(1), ..., C(S) as [S]: the mean over the orders [R, S] of the risk of their first members."""
    sizes = torch.arange(1, orders.shape[1] + 1, dtype=log_lik.dtype)
    peak = log_lik.amax(-1, keepdim=True)
    weights = (log_lik - peak).exp()  # five times as fast as logcumsumexp, and as accurate within 700 nats of the peak
    mixtures = ((weights[..., order].cumsum(-1) / sizes).log() + peak for order in orders)
    risks = [-log_mixture.sum(1).mean(0) for log_mixture in mixtures]
    return torch.stack(risks).mean(0)


def _without(orders: Tensor, left_out: Tensor) -> Tensor:
    """Return the orders [R, M] without the members that ``left_out`` [M] marks."""
    return orders[~left_out[orders]].view(len(orders), -1)


def _fit(risks: Tensor) -> Tensor:
    """Return C(inf), a_1 and a_2 as [3]."""
    sizes = torch.arange(_fitted_from(len(risks)), len(risks) + 1, dtype=risks.dtype)
    powers = torch.stack([sizes**0, 1 / sizes, 1 / sizes**2], 1)
    fitted: Tensor = torch.linalg.lstsq(powers, risks[_fitted_from(len(risks)) - 1 :, None], driver="gelsd").solution
    return fitted[:, 0]


def _fitted_from(count: int) -> int:
    return -(-count // 4)
