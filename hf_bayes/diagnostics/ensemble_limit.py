"""What infinitely many members would do, from those that there are (cold_posteriors app. F)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

MIN_MEMBERS = 8
"""Fewer do not tell three coefficients and an error."""


@dataclass(frozen=True)
class RiskAsymptote:
    """C(S) = C(inf) + a_1 / S + a_2 / S^2 of the mean negative log-likelihood of S members (cold_posteriors eq. 34).

    Attributes:
        sizes: S = 1, ..., M.
        risks: C(S), nats per term, a mean over subsets of the members.
        limit: C(inf).
        slope, curvature: a_1, a_2.
        std_error: of the limit, from leaving out one chain at a time (one member, where chains have one draw each).
    """

    sizes: list[int]
    risks: list[float]
    limit: float
    slope: float
    curvature: float
    std_error: float

    def at(self, risk: float) -> RiskAsymptote:
        """The same fall towards the limit, from ``risk`` of all members."""
        offset = risk - self.risks[-1]
        risks = [value + offset for value in self.risks]
        return replace(self, risks=risks, limit=self.limit + offset)

    @property
    def fitted_from(self) -> int:
        """The smallest S that the fit sees."""
        return _fitted_from(len(self.sizes))


def risk_asymptote(log_lik: Tensor, chain: Sequence[int]) -> RiskAsymptote | None:
    """What infinitely many members would do (cold_posteriors app. F): a least squares fit to C(S) for S >= M / 4.

    The paper fits S >= 20. C(S) is the mean over 16 random orders of the members of what the first S do together, the
    same orders whichever member is left out.

    Args:
        log_lik: [n, M] log p of n labels, of each member.
        chain: [M] which chain a member is of.
    Returns:
        None for fewer than ``MIN_MEMBERS`` members, or a label that all members call impossible.
    """
    count = log_lik.shape[1]
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
    if len(groups.unique()) == 1 or len(groups.unique()) < MIN_MEMBERS // 2:
        groups = torch.arange(count)  # too few chains to leave one out
    named = groups.unique()
    left_out = torch.stack([_fit(_risks(log_lik, _without(orders, groups == group)))[0] for group in named])
    variance = (len(named) - 1) / len(named) * (left_out - left_out.mean()).square().sum()
    sizes = list(range(1, count + 1))
    return RiskAsymptote(sizes, risks.tolist(), limit, slope, curvature, math.sqrt(float(variance)))


def _risks(log_lik: Tensor, orders: Tensor) -> Tensor:
    """[S]: C(1), ..., C(S) of the first members of each of the orders [R, S]."""
    sizes = torch.arange(1, orders.shape[1] + 1, dtype=log_lik.dtype)
    peak = log_lik.amax(1, keepdim=True)
    weights = (log_lik - peak).exp()  # five times as fast as logcumsumexp, and as good up to 700 nats below the peak
    risks = [sizes.log() - (weights[:, order].cumsum(1).log() + peak).mean(0) for order in orders]
    return torch.stack(risks).mean(0)


def _without(orders: Tensor, left_out: Tensor) -> Tensor:
    """The orders [R, M] without some members [M]."""
    return orders[~left_out[orders]].view(len(orders), -1)


def _fit(risks: Tensor) -> Tensor:
    """[3]: C(inf), a_1, a_2."""
    sizes = torch.arange(_fitted_from(len(risks)), len(risks) + 1, dtype=risks.dtype)
    powers = torch.stack([sizes**0, 1 / sizes, 1 / sizes**2], 1)
    return torch.linalg.lstsq(powers, risks[_fitted_from(len(risks)) - 1 :, None], driver="gelsd").solution[:, 0]


def _fitted_from(count: int) -> int:
    return -(-count // 4)
