"""A tensor that carries a mean and a spread through operations of torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_bayes.models.single_pass.diagonal import DiagonalSpread
from hf_bayes.models.single_pass.gaussian_tensor import (
    GaussianTensor,
    NoRule,
    gaussian_tensors_in,
    mean_of,
    replaced,
    spread_of,
)
from tests.models.single_pass.cases import normal


def moments(*shape: int) -> GaussianTensor:
    return GaussianTensor.of(normal(*shape), DiagonalSpread(normal(*shape, seed=1).square()))


def test_mean_is_the_result_on_ordinary_tensors() -> None:
    x = moments(2, 3)
    assert torch.equal(mean_of(torch.tanh(x) * 2), normal(2, 3).tanh() * 2)
    assert type(mean_of(x)) is Tensor
    assert type(x) is GaussianTensor


def test_shapes_and_comparisons_are_ordinary() -> None:
    x = moments(2, 3)
    assert x.shape == (2, 3)
    assert x.size(0) == 2
    assert x.dtype == torch.float64
    assert type(x > 0) is Tensor
    assert type(torch.zeros_like(x)) is Tensor


def test_several_results_have_spreads_of_their_own() -> None:
    first, second = moments(2, 6).split(3, -1)
    assert torch.equal(second.spread.variance, normal(2, 6, seed=1).square()[:, 3:])
    assert not torch.equal(first.spread.variance, second.spread.variance)


def test_unknown_operations_are_refused_by_name() -> None:
    with pytest.raises(NoRule, match="cumsum"):
        moments(2, 3).cumsum(0)
    with pytest.raises(NoRule, match="writes in place"):
        torch.zeros(2, 3)[0] = moments(3)


def test_gaussian_tensors_are_found_and_replaced_in_order() -> None:
    first, second = moments(2), moments(3)
    nested = ([first, 1.0], {"other": (second, None)})
    assert [id(x) for x in gaussian_tensors_in(nested)] == [id(first), id(second)]
    places = iter("ab")
    assert replaced(nested, lambda _: next(places)) == (["a", 1.0], {"other": ("b", None)})


def test_other_values_have_no_spread() -> None:
    x = moments(2)
    assert spread_of(x) is x.spread
    assert spread_of(normal(2)) is None
    assert spread_of(2.0) is None
