"""A tensor that carries a mean and a spread through operations of torch."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_bayes.models.single_pass.diagonal import DiagonalSpread
from hf_bayes.models.single_pass.factors import Factors, NoiseSources
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


@pytest.mark.parametrize("spread", [DiagonalSpread(normal(2, 3).square()), Factors(normal(4, 2, 3), NoiseSources())])
def test_certain_tensors_stay_certain(spread: Any) -> None:
    x = GaussianTensor.of(normal(2, 3), spread)
    certain = torch.arange(3.0)
    likes = (certain.to(x), certain.type_as(x), certain.expand_as(x), torch.zeros(6).view_as(x), torch.rand_like(x))
    for found in (*likes, torch.zeros(6).reshape_as(x), torch.full_like(x, 2.0)):
        assert type(found) is Tensor
    assert certain.to(x).dtype == torch.float64
    assert type(x.float().to(x)) is GaussianTensor


def test_indices_beside_uncertain_values_are_certain() -> None:
    values, indices = GaussianTensor.of(normal(2, 3), Factors(normal(4, 2, 3), NoiseSources())).topk(2)
    assert type(values) is GaussianTensor
    assert type(indices) is Tensor


def test_a_deep_copy_has_the_noise_of_its_original() -> None:
    first, second = moments(2, 3), moments(3)
    copied = copy.deepcopy({"keys": first, "values": [second, first]})
    found = copied["keys"]
    assert type(found) is GaussianTensor
    assert torch.equal(mean_of(found), mean_of(first))
    assert found.data_ptr() != first.data_ptr()
    assert found.spread is first.spread
    assert copied["values"][1] is found
    assert torch.equal(mean_of(copied["values"][0]), mean_of(second))


def test_an_operation_that_torch_does_not_differentiate_is_named() -> None:
    def failing(error: Exception) -> Any:
        def after(*_: Any) -> Any:
            raise error

        return SimpleNamespace(after=after)

    spread = failing(NotImplementedError("no forward AD.\nPlease file an issue"))
    with pytest.raises(NoRule, match=r"no rule for .*tanh \(no forward AD\): predict") as raised:
        torch.tanh(GaussianTensor.of(normal(2), spread))
    assert raised.value.spread is spread
    with pytest.raises(torch.OutOfMemoryError):  # memory is no matter of rules
        torch.tanh(GaussianTensor.of(normal(2), failing(torch.OutOfMemoryError("2 GiB"))))


def test_other_values_have_no_spread() -> None:
    x = moments(2)
    assert spread_of(x) is x.spread
    assert spread_of(normal(2)) is None
    assert spread_of(2.0) is None
