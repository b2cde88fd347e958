"""Outputs of a linear layer with random weights: exact where they are asked for, draws where they go on."""

from __future__ import annotations

from typing import Any

import torch

from hf_bayes.core.layout import Layout
from hf_bayes.models.single_pass.moments import Moments
from hf_bayes.models.single_pass.outer import Outer, drawn_products
from hf_bayes.models.single_pass.sources import LinearSource
from hf_bayes.models.single_pass.tangents import Tangents
from hf_bayes.models.single_pass.weight_laws import parts_of, weight_law
from tests.models.linear_cases import random_covariance
from tests.models.single_pass.cases import normal

COUNT, IN, OUT = 4000, 4, 3
X, COLUMNS = normal(2, 3, IN), normal(5, 2, 3, IN, seed=1)


def outputs() -> Any:
    layout = Layout(("weight", "bias"), ((OUT, IN), (OUT,)))
    covariance = random_covariance("full", layout)
    parts = parts_of(covariance, layout)
    law = weight_law(normal(OUT, IN, seed=2), normal(OUT), parts["weight"], parts["bias"])
    drawn = layout.unflatten(covariance.root(normal(COUNT, layout.dim, seed=3)) / COUNT**0.5)
    outer = Outer(law.mean, LinearSource(law.mean, None, X, law, 2.0), (drawn["weight"], drawn["bias"]))
    return Moments.of(normal(2, 3, OUT), Tangents(None, outer)), Tangents(COLUMNS, outer)


def test_draws_have_the_exact_variance() -> None:
    logits, _ = outputs()
    drawn = (
        torch.tanh(logits * 1.0).spread.roots.square().sum(0) / (1 - logits.tanh() ** 2).as_subclass(torch.Tensor) ** 2
    )
    exact = torch.Tensor(logits.spread.variance)
    assert (drawn / exact - 1).abs().max() < 0.12  # 5 standard errors: sqrt(2 / 4,000)
    assert (drawn / (exact / 2) - 1).abs().min() > 0.12  # without the factor


def test_noise_of_inputs_and_of_weights_add_up() -> None:
    logits, both = outputs()
    weight = both.outer.weight
    transported = torch.einsum("ki,sbti,sbtj,lj->btkl", weight, COLUMNS, COLUMNS, weight)
    assert (both.covariance() - logits.spread.covariance() - transported).abs().max() < 1e-10
    assert (both.variance - both.covariance().diagonal(dim1=-2, dim2=-1)).abs().max() < 1e-10


def test_a_choice_of_rows_and_a_scale_keep_the_exact_noise() -> None:
    logits, _ = outputs()
    chosen = (logits[torch.arange(2), torch.tensor([0, 2])] / 2).float().spread
    expected = logits.spread.covariance()[torch.arange(2), torch.tensor([0, 2])] / 4
    assert (chosen.covariance() - expected).abs().max() < 1e-10


def test_products_of_draws_are_one_product_each() -> None:
    draws = normal(7, OUT, IN, seed=5)
    assert (drawn_products(X, draws) - torch.einsum("ski,bti->sbtk", draws, X)).abs().max() < 1e-12
