"""Moments of a linear layer against the printed equations and Monte Carlo, and whole networks against both."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hf_bayes.core.layout import Layout
from hf_bayes.distributions.covariance import COVARIANCES, Diagonal, dense
from hf_bayes.models.single_pass.activations import elementwise
from hf_bayes.models.single_pass.linear import linear, root_of
from hf_bayes.models.single_pass.weight_laws import parts_of, weight_law
from tests.models.linear_cases import random_covariance
from tests.models.single_pass.cases import covariance_matrix, normal

OUT, IN = 3, 4


@pytest.mark.parametrize("kind", COVARIANCES)
def test_linear_layer_is_the_printed_equation(kind: str) -> None:
    layout = Layout(("weight",), ((OUT, IN),))
    posterior = random_covariance(kind, layout)
    weight, bias, x, spread = normal(OUT, IN), normal(OUT, seed=1), normal(IN, seed=2), covariance_matrix(IN)
    law = weight_law(weight, bias, parts_of(posterior, layout)["weight"], None)
    mean, covariance = linear(x[None], spread[None], law)
    cov_w = dense(posterior, x).view(OUT, IN, OUT, IN)
    for k in range(OUT):
        for m in range(OUT):  # eq. 2, term by term
            outer = x[:, None] * x
            terms = outer * cov_w[k, :, m] + weight[k][:, None] * weight[m] * spread + spread * cov_w[k, :, m]
            assert (covariance[0, k, m] - terms.sum()).abs() < 1e-10 * covariance.abs().max()  # rounding
    assert (mean[0] - (weight @ x + bias)).abs().max() < 1e-12


def paper_mlp(x: Tensor, layers: list[nn.Linear], variance: float, function: object) -> tuple[Tensor, Tensor]:
    """The rules of the paper, as loops over units, for weights and biases of one variance."""
    mean, spread = x, torch.zeros(len(x), len(x), dtype=x.dtype)
    for index, layer in enumerate(layers):
        weight = layer.weight.detach()
        added = variance * ((mean.square() + spread.diagonal()).sum() + 1)
        mean, spread = (
            weight @ mean + layer.bias.detach(),
            weight @ spread @ weight.mT + added * torch.eye(len(weight), dtype=x.dtype),
        )
        if index < len(layers) - 1:
            mean, spread = elementwise(mean[None], spread[None], function)  # type: ignore[arg-type]
            mean, spread = mean[0], spread[0]
    return mean, spread


@pytest.mark.parametrize("variance", [1e-4, 1e-2, 1e-1])
@pytest.mark.parametrize("function", [torch.relu, torch.tanh, nn.functional.gelu])
def test_mlp_follows_the_rules_of_the_paper(function: object, variance: float) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(5, 8).double(), nn.Linear(8, 6).double(), nn.Linear(6, 2).double()]
    x = normal(5)
    mean, spread = x[None], torch.zeros(1, 5, 5, dtype=x.dtype)
    for index, layer in enumerate(layers):
        shapes = tuple(tuple(p.shape) for p in layer.parameters())
        layout = Layout(("weight", "bias"), shapes)
        parts = parts_of(Diagonal(torch.full((layout.dim,), variance**0.5, dtype=x.dtype)), layout)
        law = weight_law(layer.weight.detach(), layer.bias.detach(), parts["weight"], parts["bias"])
        mean, spread = linear(mean, spread, law)
        if index < 2:
            mean, spread = elementwise(mean, spread, function)  # type: ignore[arg-type]
    expected = paper_mlp(x, layers, variance, function)
    assert (mean[0] - expected[0]).abs().max() < 1e-10
    assert (spread[0] - expected[1]).abs().max() < 1e-10 * expected[1].abs().max()


def test_root_squares_to_a_singular_covariance() -> None:
    column = normal(4, 2)
    root = root_of(column @ column.mT)
    assert (root @ root.mT - column @ column.mT).abs().max() < 1e-12
