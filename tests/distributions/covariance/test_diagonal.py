from __future__ import annotations

import math

import pytest
import torch

from hf_bayes.core.layout import Layout
from hf_bayes.distributions.covariance.diagonal import Diagonal

LAYOUT = Layout(("a", "b"), ((2,), (1,)))
COVARIANCE = Diagonal(torch.tensor([1.0, 2.0, 4.0]))


def test_numbers_are_those_of_the_squared_deviations() -> None:
    ones = torch.ones(3)
    assert COVARIANCE.variance.tolist() == COVARIANCE.product(ones).tolist() == [1.0, 4.0, 16.0]
    assert COVARIANCE.precision_diagonal.tolist() == COVARIANCE.precision_product(ones).tolist() == [1.0, 0.25, 0.0625]
    assert COVARIANCE.root(ones).tolist() == [1.0, 2.0, 4.0]
    assert float(COVARIANCE.log_det) == pytest.approx(math.log(64.0))


def test_tensors_are_named_by_their_parameters_and_come_back() -> None:
    tensors = COVARIANCE.tensors(LAYOUT)
    assert {name: value.tolist() for name, value in tensors.items()} == {"stds.a": [1.0, 2.0], "stds.b": [4.0]}
    assert torch.equal(Diagonal.from_tensors(tensors, LAYOUT).std, COVARIANCE.std)
