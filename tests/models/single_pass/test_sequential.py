"""A single pass through plain MLPs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hf_bayes.core.layout import initial, select
from hf_bayes.distributions.covariance import Diagonal
from hf_bayes.models.single_pass.sequential import sequential_outputs
from tests.models.single_pass.cases import DOUBLE, normal

X = normal(5, 4)


def outputs(model: nn.Sequential, structure: str, variance: float = 1e-2) -> tuple[torch.Tensor, torch.Tensor]:
    layout = select(model, "all")
    mean = initial(model, layout)
    return sequential_outputs(
        model, layout, mean, Diagonal(torch.full_like(mean, variance**0.5)), X, structure=structure
    )


@pytest.mark.parametrize("structure", ["low_rank", "diagonal", "full"])
def test_one_linear_layer_is_exact(structure: str) -> None:
    model = nn.Sequential(nn.Linear(4, 3)).double()
    mean, covariance = outputs(model, structure)
    expected = 1e-2 * (X.square().sum(1) + 1)[:, None, None] * torch.eye(3, dtype=DOUBLE)
    assert torch.equal(mean, model(X))
    assert (covariance - expected).abs().max() < 1e-10


def test_the_variance_of_an_mlp_is_that_of_members() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.Sequential(nn.Tanh(), nn.Linear(16, 2))).double()
    _, covariance = outputs(model, "full", 1e-4)
    names, start = zip(*model.named_parameters(), strict=True)
    draws = [[p.detach() + 1e-2 * normal(*p.shape, seed=9 * s + i) for i, p in enumerate(start)] for s in range(4000)]
    run = [torch.func.functional_call(model, dict(zip(names, draw, strict=True)), (X,)) for draw in draws]
    ratio = covariance.diagonal(dim1=-2, dim2=-1) / torch.stack(run).var(0)
    assert (ratio - 1).abs().max() < 0.1  # four standard errors sqrt(2 / 4000) of ten variances, and linearisation


@pytest.mark.parametrize("structure", ["low_rank", "diagonal"])
def test_a_module_that_stands_twice_runs_twice(structure: str) -> None:
    torch.manual_seed(0)
    shared, activation = nn.Linear(4, 4), nn.Tanh()
    model = nn.Sequential(shared, activation, nn.Sequential(shared, activation), nn.Linear(4, 2)).double()
    mean, _ = outputs(model, structure, 1e-8)
    assert (mean - model(X)).abs().max() < 1e-6
    with pytest.raises(ValueError, match=r"^0: structure='full' supports one call of each random module"):
        outputs(model, "full")


@pytest.mark.parametrize("structure", ["low_rank", "diagonal", "full"])
@pytest.mark.parametrize("rank", [0, -3, 2.5, True, "a"])
def test_ranks_that_are_no_counts_are_refused(structure: str, rank: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 3)).double()
    layout = select(model, "all")
    mean = initial(model, layout)
    with pytest.raises(ValueError, match=r"rank must be a whole number of at least 1, got "):
        sequential_outputs(model, layout, mean, Diagonal(torch.ones_like(mean)), X, structure=structure, rank=rank)


def test_a_layer_without_a_rule_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))).double()
    with pytest.raises(ValueError, match=r"1\.0 \(BatchNorm1d\): a single pass of an nn.Sequential has no rule"):
        outputs(model, "low_rank")
