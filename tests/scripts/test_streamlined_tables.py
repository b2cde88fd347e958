from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from hf_bayes.core.layout import select
from hf_bayes.distributions.approximations import Gaussian
from hf_bayes.distributions.covariance import Diagonal, Full, dense
from scripts.reproduce import streamlined_tables
from scripts.reproduce.streamlined_models import mlp, single_pass
from tests.models.linear_cases import random_covariance
from tests.scripts.pages import page

SLOPES = {
    "relu": lambda h: (h > 0).double(),
    "tanh": lambda h: 1 - h.tanh().square(),
    "gelu": lambda h: (1 + torch.erf(h / 2**0.5)) / 2 + h * torch.exp(-h.square() / 2) / (2 * torch.pi) ** 0.5,
}
FUNCTIONS = {"relu": torch.relu, "tanh": torch.tanh, "gelu": torch.nn.functional.gelu}


def paper_rules(weights: list[tuple[Tensor, Tensor, Tensor]], x: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """Eqs. 1 to 4 for one input, written with one sum for each term.

    Args:
        weights: (W [m, n], b [m], covariance [m n + m, m n + m] of W and b) of each layer.
        x: [n].
    """
    mean, spread = x, torch.zeros(len(x), len(x), dtype=torch.float64)
    for index, (weight, bias, covariance) in enumerate(weights):
        if index:
            rate = SLOPES[activation](mean)
            mean, spread = FUNCTIONS[activation](mean), rate[:, None] * spread * rate
        m, n = weight.shape
        ww = covariance[: m * n, : m * n].reshape(m, n, m, n)
        wb, bb = covariance[: m * n, m * n :].reshape(m, n, m), covariance[m * n :, m * n :]
        moved = torch.einsum("i,j,kilj->kl", mean, mean, ww)  # E a_i E a_j Cov[W_ki, W_lj]
        moved = moved + torch.einsum("ki,lj,ij->kl", weight, weight, spread)
        moved = moved + torch.einsum("ij,kilj->kl", spread, ww)
        with_bias = torch.einsum("i,kil->kl", mean, wb)
        mean, spread = weight @ mean + bias, moved + with_bias + with_bias.mT + bb
    return mean, spread


@pytest.mark.parametrize("variance", [1e-4, 1e-2, 5e-2])
@pytest.mark.parametrize("activation", FUNCTIONS)
@pytest.mark.parametrize("kind", ["diagonal", "full"])
def test_an_mlp_follows_the_rules_of_the_paper(kind: str, activation: str, variance: float) -> None:
    model = mlp((3, 5, 4, 2), activation)
    layout = select(model, "all")
    theta = torch.cat([p.detach().flatten() for p in model.parameters()])
    dense_one = dense(random_covariance(kind, layout), theta)
    dense_one *= variance / dense_one.diagonal().mean()
    stds, precision = dense_one.diagonal().sqrt(), torch.linalg.inv(dense_one)
    covariance = Diagonal(stds) if kind == "diagonal" else Full(torch.linalg.cholesky(precision))
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = single_pass(model, posterior(Gaussian(theta[None], (covariance,))), x)
    layers, start = [], 0
    for layer in model.layers[::2]:
        stop = start + layer.weight.numel() + layer.bias.numel()
        layers.append((layer.weight.detach(), layer.bias.detach(), dense_one[start:stop, start:stop]))
        start = stop
    for row, mean, spread in zip(x, found.mean, found.covariance, strict=True):
        expected_mean, expected = paper_rules(layers, row, activation)
        assert (mean - expected_mean).abs().max() < 1e-12
        assert (spread - expected).abs().max() < 1e-10 * expected.abs().max()


def posterior(gaussian: Gaussian) -> SimpleNamespace:
    return SimpleNamespace(approximation=gaussian, config=SimpleNamespace(layer_factors={}))


@pytest.mark.filterwarnings("ignore")
def test_the_page_is_made_from_a_short_run(tmp_path: Path) -> None:
    csv = tmp_path / "plane.csv"
    rows = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    csv.write_text("\n".join(",".join(map(str, [*row, sum(row)])) for row in rows.tolist()))
    sizes = streamlined_tables.Arguments(
        seeds=1, steps=20, mean_field_steps=10, members=4, regressions=("diabetes",), classifications=("wine",),
        csv=(str(csv),), ood_rows=60, grid=6, max_rows=60,
    )  # fmt: skip
    record = json.loads(json.dumps(streamlined_tables.run(sizes)))
    text = page(streamlined_tables, record, tmp_path)
    assert "| plane |" in text
    assert "| wine |" in text
