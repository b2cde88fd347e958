"""The decomposition from its definition in float64, and logits to compare it on."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.testing import assert_close

from hf_bayes.uncertainty.decomposition import Prediction, Uncertainty

# Absolute, in nats. Of the float32 figure, half is the last bit of a total near 10 nats.
ATOL = {torch.float64: 1e-10, torch.float32: 2e-6, torch.bfloat16: 2e-6, torch.float16: 2e-6}

INF = math.inf


def brute_force(logits: Tensor) -> Prediction:
    """Compute eq. 2 in float64, directly from its definition."""
    log_p = logits.double().log_softmax(-1)
    log_q = log_p.logsumexp(0) - math.log(len(logits))
    total = torch.special.entr(log_q.exp()).sum(-1)
    aleatoric = torch.special.entr(log_p.exp()).sum(-1).mean(0)
    terms = torch.where(log_p > -INF, log_p.exp() * (log_p - log_q), 0.0)
    return Prediction(log_q, Uncertainty(total, aleatoric, terms.sum(-1).mean(0)))


def random_logits(*shape: int, scale: float = 3.0, spread: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return logits [M, ..., C]: members scatter by ``spread`` around common logits of size ``scale``."""
    rng = torch.Generator().manual_seed(math.prod(shape))
    common = scale * torch.randn((1, *shape[1:]), generator=rng, dtype=torch.float64)
    return (common + spread * torch.randn(shape, generator=rng, dtype=torch.float64)).to(dtype)


def check(method: Callable[[Tensor], Uncertainty], logits: Tensor) -> None:
    found, expected = method(logits), brute_force(logits).uncertainty
    for name, value, reference in zip(Uncertainty._fields, found, expected, strict=True):
        assert_close(value.double(), reference, rtol=0, atol=ATOL[logits.dtype], msg=lambda m, n=name: f"{n}: {m}")


def naive(logits: Tensor) -> Uncertainty:
    """The formula written directly: correct, but slow, large, and inaccurate where entropies nearly cancel."""
    p = logits.float().softmax(-1)
    total, aleatoric = torch.special.entr(p.mean(0)).sum(-1), torch.special.entr(p).sum(-1).mean(0)
    return Uncertainty(total, aleatoric, total - aleatoric)
