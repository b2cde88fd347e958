"""Shared noise: sums of correlated tensors, and operations of torch, against Jacobians."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hf_bayes.models.single_pass.factors import Factors, NoiseSources, added_noise, linear_factors, lora_factors
from hf_bayes.models.single_pass.gaussian_tensor import GaussianTensor
from tests.models.single_pass.cases import covariance_matrix, normal

MEAN, ROOTS = normal(2, 3, 4), normal(5, 2, 3, 4, seed=1)


def gaussian() -> Any:
    return GaussianTensor.of(MEAN.clone(), Factors(ROOTS, NoiseSources()))


def test_a_branch_and_its_skip_connection_are_correlated() -> None:
    x = gaussian()
    found = (x + nn.functional.linear(x, -torch.eye(4, dtype=MEAN.dtype))).spread
    assert found.variance.abs().max() < 1e-20
    assert x.spread.variance.min() > 0


def test_any_function_is_linearised() -> None:
    def function(x: Any) -> Any:
        return torch.tanh(x.view(2, 12).cumsum(1)).softmax(-1)

    jacobian = torch.func.jacrev(function)(MEAN)
    expected = torch.einsum("boczd,rczd->rbo", jacobian, ROOTS) if jacobian.ndim == 5 else None
    found = function(gaussian()).spread.roots
    assert expected is not None
    assert (found - expected).abs().max() < 1e-12


def test_new_noise_is_independent_of_earlier_noise() -> None:
    sources = NoiseSources()
    like = Factors(torch.zeros(0), sources)
    joint = covariance_matrix(6).expand(2, 6, 6)
    first = added_noise(joint, torch.Size((2, 3, 2)), None, like)
    second = added_noise(joint, torch.Size((2, 3, 2)), first, like)
    flat = second.roots.permute(1, 2, 3, 0).reshape(2, 6, -1)
    assert (flat @ flat.mT - 2 * joint).abs().max() < 1e-10
    assert sources.count == 12
    assert first.roots.shape[0] != second.roots.shape[0]


def test_layers_with_many_outputs_are_refused() -> None:
    law = SimpleNamespace(mean=torch.zeros(700, 2))
    like, x = Factors(torch.zeros(0), NoiseSources()), torch.zeros(1, 6, 2)
    with pytest.raises(ValueError, match=r"6 tokens x 700 units = 4200 here, and takes at most 4096"):
        linear_factors(SimpleNamespace(path="a", law=law), x, None, like)
    lora = SimpleNamespace(path="b", low=SimpleNamespace(mean=torch.zeros(2, 2)), high=law, whole=torch.zeros(700, 2))
    with pytest.raises(ValueError, match="Choose structure='low_rank'"):
        lora_factors(lora, x, None, like)


def test_a_detached_tensor_keeps_its_noise() -> None:
    x = gaussian()
    assert torch.equal(x.detach().spread.roots, ROOTS)


def test_deterministic_scores_leave_weights_of_attention_certain() -> None:
    scores = GaussianTensor.of(normal(2, 1, 3, 4), Factors(ROOTS[:, :, None], NoiseSources(), True))
    assert type(scores.softmax(-1)) is torch.Tensor
    assert type(scores.view(2, 3, 4).softmax(-1)) is GaussianTensor  # three dimensions: no scores of attention


def test_a_second_call_of_a_module_is_refused() -> None:
    sources = NoiseSources(lambda: 3)
    sources.add_module("query", 3)
    sources.add_module("table", 1)
    with pytest.raises(ValueError, match=r"^query: .* one call of each random module .* structure='low_rank'"):
        sources.add_module("query", 3)
    with pytest.raises(ValueError, match=r"^value: .* got 7 rows, expected 3: .* positions first"):
        sources.add_module("value", 7)
