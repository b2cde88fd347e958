"""Questions about the arguments of operations of torch."""

from __future__ import annotations

import pytest
import torch

from hf_bayes.models.single_pass.diagonal import DiagonalSpread
from hf_bayes.models.single_pass.gaussian_tensor import GaussianTensor, NoRule
from hf_bayes.models.single_pass.operations import (
    ARRANGEMENTS,
    RESHAPES,
    as_tuple,
    certain_weight,
    index_of_each,
    is_one_number,
    num_uncertain,
)
from tests.models.single_pass.cases import normal


def moments(*shape: int) -> GaussianTensor:
    return GaussianTensor.of(normal(*shape), DiagonalSpread(normal(*shape, seed=1).square()))


def test_an_uncertain_weight_is_refused() -> None:
    weight = normal(2, 3)
    assert certain_weight((normal(4, 3), weight), {}) is weight
    assert certain_weight((normal(4, 3),), {"weight": weight}) is weight
    with pytest.raises(NoRule, match="an uncertain weight"):
        certain_weight((normal(4, 3), moments(2, 3)), {})


def test_uncertain_arguments_are_counted_at_any_depth() -> None:
    x = moments(2, 3)
    assert num_uncertain((x, 2.0)) == 1
    assert num_uncertain(([x, normal(2, 3)], {"other": x})) == 2
    assert num_uncertain((normal(2, 3), None)) == 0


def test_numbers_and_tensors_of_one_element_scale() -> None:
    assert is_one_number(2.0)
    assert is_one_number(torch.tensor([[2.0]]))
    assert not is_one_number(torch.ones(2))


def test_an_index_is_a_tuple_of_dimensions() -> None:
    assert as_tuple(3) == (3,)
    assert as_tuple((3, ...)) == (3, ...)
    assert set(RESHAPES) < set(ARRANGEMENTS)


def test_an_index_is_told_apart_by_dimension() -> None:
    whole, take = slice(None), torch.Tensor.__getitem__
    rows = torch.tensor([1, 0])
    assert index_of_each(take, (None, (whole, whole, slice(-3, None))), 4) == [whole, whole, slice(-3, None), whole]
    assert index_of_each(take, (None, (..., slice(2))), 3) == [whole, whole, slice(2)]
    assert index_of_each(take, (None, (whole, None, 1)), 3) == [whole, 1, whole]
    assert index_of_each(take, (None, (rows, ...)), 3) == [rows, whole, whole]
    assert index_of_each(take, (None, (rows, rows)), 3) is None
    assert index_of_each(take, (None, rows[None] > 0), 3) is None
    assert index_of_each(torch.narrow, (None, -1, 1, 2), 3) == [whole, whole, slice(1, 3)]
    assert index_of_each(torch.Tensor.select, (None, 1, 0), 3) == [whole, 0, whole]
