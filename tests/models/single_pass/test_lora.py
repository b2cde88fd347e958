"""The variance of a product of random factors against Monte Carlo."""

from __future__ import annotations

import pytest
import torch

from hf_bayes.core.layout import Layout
from hf_bayes.distributions.covariance import Covariance
from hf_bayes.models.single_pass.lora import lora_variance
from hf_bayes.models.single_pass.weight_laws import parts_of, weight_law
from tests.models.linear_cases import random_covariance
from tests.models.single_pass.cases import normal

IN, RANK, OUT = 5, 2, 3


@pytest.mark.parametrize("kind", ["diagonal", "kronecker"])
@pytest.mark.parametrize("spread", [0.0, 0.5])
def test_lora_has_the_variance_of_draws(kind: str, spread: float) -> None:
    a, b, x = normal(RANK, IN), normal(OUT, RANK, seed=1), normal(IN, seed=2)
    layouts = Layout(("a",), ((RANK, IN),)), Layout(("b",), ((OUT, RANK),))
    laws: list[tuple[Covariance, Layout]] = [
        (random_covariance(kind, one, seed), one) for seed, one in enumerate(layouts)
    ]
    low, high = (weight_law(m, None, parts_of(c, n)[n.names[0]], None) for m, (c, n) in zip((a, b), laws, strict=True))
    variance = torch.full_like(x, spread) if spread else None
    found = sum(lora_variance(x, variance, low, high, 2.0))
    if variance is not None:
        found = found + variance @ (2.0 * b @ a).square().mT
    count = 200_000
    factors = [
        (mean.flatten() + c.root(normal(count, mean.numel(), seed=7 + i))).view(count, *mean.shape)
        for i, (mean, (c, _)) in enumerate(zip((a, b), laws, strict=True))
    ]
    inputs = x + spread**0.5 * normal(count, IN, seed=9)
    draws = 2.0 * torch.einsum("nkr,nri,ni->nk", factors[1], factors[0], inputs)
    # a product of three Gaussians has a kurtosis of up to 30: 4 sqrt(30 / 2e5) = 0.05
    tolerance = 0.05
    assert (found / draws.var(0) - 1).abs().max() < tolerance
    fixed = lora_variance(x, variance, low, weight_law(b, None, None, None), 2.0)[0]
    assert (fixed / draws.var(0) - 1).abs().max() > tolerance  # without the noise of B
