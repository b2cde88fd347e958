from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from hf_bayes.core.layout import Layout
from hf_bayes.distributions.covariance import COVARIANCES, dense
from hf_bayes.members.module_hooks import HookedLayer, LayerRecord
from hf_bayes.models.linearised import layer_covariance
from hf_bayes.models.linearised.layer_covariance import (
    LayerReads,
    by_jacobian,
    covariance_of_layers,
    over_inputs,
    paired,
    read_positions,
)
from tests.models.linear_cases import random_covariance

OUTPUTS, ROWS, POSITIONS = 3, 4, 11


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gradients(width: int, positions: int = POSITIONS) -> Tensor:
    return normal(OUTPUTS, ROWS, positions, width, seed=1)


def hooked(path: str, module: nn.Module, *attributes: str) -> HookedLayer:
    return HookedLayer(path, module.double(), {name: f"{path}.{name}" for name in attributes}, set())


LINEAR = hooked("linear", nn.Linear(5, 4), "weight", "bias")
READS = {
    "Linear": [LayerReads(LINEAR, normal(ROWS, POSITIONS, 5), gradients(4))],
    "called twice": [LayerReads(LINEAR, normal(ROWS, count, 5), gradients(4, count)) for count in (1, POSITIONS)],
    "Conv1D": [LayerReads(hooked("conv", Conv1D(4, 5), "weight"), normal(ROWS, POSITIONS, 5), gradients(4))],
    "LayerNorm": [
        LayerReads(hooked("norm", nn.LayerNorm(5), "weight", "bias"), normal(ROWS, POSITIONS, 5), gradients(5))
    ],
    "Embedding": [
        LayerReads(hooked("words", nn.Embedding(3, 2), "weight"), torch.arange(44).view(4, 11) % 3, gradients(2))
    ],
}


def jacobian_of(reads: list[LayerReads]) -> tuple[Layout, Tensor]:
    """Return the Jacobian [B, C, d] by autograd, one row and one output at a time."""
    layer = reads[0].layer
    parameters = [getattr(layer.module, attribute) for attribute in layer.names]
    rows = torch.zeros(ROWS, OUTPUTS, sum(p.numel() for p in parameters), dtype=torch.float64)
    for read in reads:
        for row in range(ROWS):
            for output in range(OUTPUTS):
                value = (layer.module(read.x[row]) * read.g[output, row]).sum()
                found = torch.autograd.grad(value, parameters)
                rows[row, output] += torch.cat([part.flatten() for part in found])
    return Layout(tuple(layer.names.values()), tuple(tuple(p.shape) for p in parameters)), rows


@pytest.mark.parametrize("max_paired", [0, 100])
@pytest.mark.parametrize("kind", COVARIANCES)
@pytest.mark.parametrize("name", READS)
def test_covariance_equals_that_of_the_whole_jacobian(
    name: str, kind: str, max_paired: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer_covariance, "MAX_PAIRED", max_paired)
    monkeypatch.setattr(layer_covariance, "JACOBIAN_BUDGET", 1)  # a row at a time
    reads = READS[name]
    layout, jacobian = jacobian_of(reads)
    covariance = random_covariance(kind, layout)
    found = covariance_of_layers(covariance, layout, reads, jacobian)
    expected = jacobian @ dense(covariance, jacobian) @ jacobian.mT
    assert (found - expected).abs().max() < 1e-10 * expected.abs().max()


@pytest.mark.parametrize("elements", [1, 70, 1000])
@pytest.mark.parametrize("function", [paired, by_jacobian])
def test_blocks_of_any_size_give_the_same_sum(function: object, elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(layer_covariance.BLOCK_ELEMENTS, "cpu", elements)
    x, g, variances = normal(ROWS, POSITIONS, 5), gradients(4), normal(4, 5).exp()
    jacobian = torch.einsum("cbti,btj->bcij", g, x)
    expected = torch.einsum("bcij,bdij,ij->bcd", jacobian, jacobian, variances)
    assert (function(x, g, variances) - expected).abs().max() < 1e-10 * expected.abs().max()  # type: ignore[operator]


def test_positions_without_a_gradient_are_left_out() -> None:
    g, x = gradients(4).clone(), normal(ROWS, POSITIONS, 5)
    g[:, 0, 1:], g[:, 1, :-2], g[:, 2:] = 0, 0, 0
    few = read_positions(LINEAR, x, list(g))
    assert few.x.shape[1] == few.g.shape[2] == 2
    assert torch.allclose(torch.einsum("cbti,btj->bcij", few.g, few.x), torch.einsum("cbti,btj->bcij", g, x))


@pytest.mark.parametrize("bias", [False, True])
def test_few_inputs_take_the_place_of_positions(bias: bool) -> None:
    layer = hooked("linear", nn.Linear(5, 4), *("weight", "bias")[: 1 + bias])
    x, g = normal(ROWS, POSITIONS, 5), gradients(4)
    records = [LayerRecord(layer, 0, x, one, slice(None), None, first=True, again=False) for one in g]
    few = [over_inputs(record, torch.float64) for record in records]
    assert few[0].x.shape[1] == few[0].g.shape[1] == (POSITIONS if bias else 5)
    layout, jacobian = jacobian_of([LayerReads(layer, x, g)])
    covariance = random_covariance("kron", layout)
    reads = read_positions(layer, few[0].x, [record.g for record in few])
    expected = jacobian @ dense(covariance, jacobian) @ jacobian.mT
    assert (covariance_of_layers(covariance, layout, [reads], jacobian) - expected).abs().max() < 1e-10


def test_a_jacobian_may_be_rotated_after_the_sum_over_positions() -> None:
    x, g, variances = normal(ROWS, POSITIONS, 5), gradients(4), normal(4, 5, seed=2).square()
    left, right = normal(4, 4, seed=3), normal(5, 5, seed=4)
    expected = by_jacobian(x @ right, g @ left, variances)
    for own, given, options in (
        (x, g, {"left": left, "right": right}), (x @ right, g, {"left": left}), (x, g @ left, {"right": right}),
    ):  # fmt: skip
        found = by_jacobian(own, given, variances, **options)
        assert (found - expected).abs().max() < 1e-12 * expected.abs().max()
    assert (by_jacobian(x, g, variances, left=left.mT, right=right) - expected).abs().max() > 0.1
