from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hf_bayes.methods.mcmc.penalty import finite_population_factor
from hf_bayes.objectives.private_rows import PrivateRows


@pytest.mark.parametrize("disjoint", [False, True], ids=["independent", "disjoint"])
def test_strata_estimate_the_sum_of_rows_and_its_variance(disjoint: bool) -> None:
    sizes, batch, count, repeats = (9, 24), 2, 3, 4000
    rows = [torch.randn(n, generator=torch.Generator().manual_seed(n)).double() * n for n in sizes]
    strata = [PrivateRows(sizes, rank, batch, count, disjoint) for rank in range(2)]
    rng = torch.Generator().manual_seed(0)

    def estimate() -> Tensor:
        """[K] for all rows, as processes sum them: the trainer's scale is N / (b P)."""
        parts = []
        for y, place in zip(rows, strata, strict=True):
            orders = [torch.randperm(len(y), generator=rng) for _ in range(1 if disjoint else count)]
            drawn = torch.cat([order[: batch * (count if disjoint else 1)] for order in orders])
            parts.append(place.contribution(y[drawn].view(1, count, batch).sum(2)))
        return (sum(sizes) / (batch * 2) * sum(parts))[0]

    found = torch.stack([estimate() for _ in range(repeats)])
    means, total = found.mean(1), float(sum(y.sum() for y in rows))
    assert abs(means.mean() - total) < 4 * means.std() / math.sqrt(repeats)
    factor = finite_population_factor(count, 2 * batch / sum(sizes)) if disjoint else 1.0
    estimated = factor * found.var(1) / count
    error = math.hypot(float(estimated.std() / math.sqrt(repeats)), float(means.var()) * math.sqrt(2 / repeats))
    assert abs(estimated.mean() - means.var()) < 4 * error
