"""Outputs of a linear layer with random weights: exact where they are asked for, draws where they go on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from hf_bayes.core.layout import Layout
from hf_bayes.models.single_pass.gaussian_tensor import GaussianTensor
from hf_bayes.models.single_pass.outer import Outer, drawn_products
from hf_bayes.models.single_pass.second_order import with_drift
from hf_bayes.models.single_pass.sources import LinearSource
from hf_bayes.models.single_pass.tangents import Tangents
from hf_bayes.models.single_pass.weight_laws import parts_of, weight_law
from tests.models.linear_cases import random_covariance
from tests.models.single_pass.cases import normal

COUNT, IN, OUT = 4000, 4, 3
X, COLUMNS, DRIFT = normal(2, 3, IN), normal(5, 2, 3, IN, seed=1), normal(2, 3, IN, seed=4)


def outputs() -> Any:
    layout = Layout(("weight", "bias"), ((OUT, IN), (OUT,)))
    covariance = random_covariance("full", layout)
    parts = parts_of(covariance, layout)
    law = weight_law(normal(OUT, IN, seed=2), normal(OUT), parts["weight"], parts["bias"])
    drawn = layout.unflatten(covariance.root(normal(COUNT, layout.dim, seed=3)) / COUNT**0.5)
    outer = Outer(law.mean, LinearSource(law.mean, None, X, law, 2.0), (drawn["weight"], drawn["bias"]))
    return GaussianTensor.of(normal(2, 3, OUT), Tangents(None, outer)), Tangents(with_drift(COLUMNS, DRIFT), outer)


def test_draws_have_the_exact_variance() -> None:
    logits, _ = outputs()
    drawn = logits.spread.roots.square().sum(0)
    exact = torch.Tensor(logits.spread.variance)
    assert (drawn / exact - 1).abs().max() < 0.12  # 5 standard errors: sqrt(2 / 4,000)
    assert (drawn / (exact / 2) - 1).abs().min() > 0.12  # without the factor


def test_noise_of_weights_multiplies_the_second_moment() -> None:
    logits, both = outputs()
    weight, law = both.outer.weight, both.outer.own.law
    transported = torch.einsum("ki,sbti,sbtj,lj->btkl", weight, COLUMNS, COLUMNS, weight)
    parts = [law.covariance(X + DRIFT, None), *(law.without_bias().covariance(column, None) for column in COLUMNS)]
    expected = transported + 2.0 * sum(parts)  # 2.0 is the factor of the noise
    assert (both.covariance() - expected).abs().max() < 1e-10
    assert (both.variance - both.covariance().diagonal(dim1=-2, dim2=-1)).abs().max() < 1e-10
    total, first_order = (
        part.diagonal(dim1=-2, dim2=-1).sum() for part in (expected, transported + logits.spread.covariance())
    )
    assert total > 1.5 * first_order  # without the second moment


def test_a_correlated_layer_is_sketched_where_it_is_asked_for() -> None:
    _, both = outputs()
    columns = with_drift(normal(COUNT, 2, 3, IN, seed=8) / COUNT**0.5, DRIFT)
    spread, vectors = both.new(columns, replace(both.outer, drawn=True, gain=2.0)), normal(2, 3, OUT, seed=9)
    roots = spread.roots
    expected = torch.einsum("sbtk,sbtl->btkl", roots, roots)
    limit = 1e-7 * expected.abs().max()  # ``at_draws`` has its scale in float32
    assert (spread.covariance() - expected).abs().max() < limit
    assert (spread.variance - roots.square().sum(0)).abs().max() < limit
    assert (spread.times(vectors) - (expected @ vectors[..., None])[..., 0]).abs().max() < 4 * limit
    alone = both.new(None, replace(both.outer, drawn=True))  # without noise of x there is nothing to be correlated with
    assert torch.equal(alone.covariance(), both.new(None, both.outer).covariance())


def test_columns_sketch_the_second_moment() -> None:
    _, both = outputs()
    columns = normal(COUNT, 2, 3, IN, seed=8) / COUNT**0.5
    spread = both.new(with_drift(columns, DRIFT), both.outer)
    assert spread.roots.shape == (COUNT, 2, 3, OUT)
    assert (spread.roots.square().sum(0) / spread.variance - 1).abs().max() < 0.15  # 5 se of a product: sqrt(4 / 4,000)
    assert (spread.drift - DRIFT @ both.outer.weight.mT).abs().max() < 1e-12


def test_a_choice_of_rows_and_a_scale_keep_the_exact_noise() -> None:
    logits, _ = outputs()
    chosen = (logits[torch.arange(2), torch.tensor([0, 2])] / 2).float().spread
    expected = logits.spread.covariance()[torch.arange(2), torch.tensor([0, 2])] / 4
    assert (chosen.covariance() - expected).abs().max() < 1e-10


def test_products_of_draws_are_one_product_each() -> None:
    draws, inputs = normal(7, OUT, IN, seed=5), normal(7, 2, 3, IN, seed=6)
    assert (drawn_products(inputs, draws) - torch.einsum("ski,sbti->sbtk", draws, inputs)).abs().max() < 1e-12
    assert torch.equal(drawn_products(X[None], draws), drawn_products(X.expand(7, -1, -1, -1), draws))
