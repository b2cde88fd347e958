from __future__ import annotations

import math

import pytest
import torch

from hf_bayes.distributions.covariance.full import Full

FACTOR = torch.tensor([[2.0, 0.0], [1.0, 1.0]])
"""The precision is [[4, 2], [2, 2]], the covariance [[0.5, -0.5], [-0.5, 1]]."""


def test_numbers_are_those_of_the_inverse_precision() -> None:
    covariance = Full(FACTOR)
    torch.testing.assert_close(covariance.product(torch.eye(2)), torch.tensor([[0.5, -0.5], [-0.5, 1.0]]))
    torch.testing.assert_close(covariance.precision_product(torch.eye(2)), torch.tensor([[4.0, 2.0], [2.0, 2.0]]))
    torch.testing.assert_close(covariance.variance, torch.tensor([0.5, 1.0]))
    assert covariance.precision_diagonal.tolist() == [4.0, 2.0]
    assert float(covariance.log_det) == pytest.approx(math.log(0.25))


def test_a_root_times_its_transpose_is_the_covariance() -> None:
    root = Full(FACTOR).root(torch.eye(2)).T
    torch.testing.assert_close(root @ root.T, torch.tensor([[0.5, -0.5], [-0.5, 1.0]]))


@pytest.mark.parametrize("factor", [FACTOR.T, -FACTOR, FACTOR[:1]], ids=["upper", "negative", "not square"])
def test_a_factor_of_no_precision_is_refused(factor: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"needs a lower triangular \[d, d\] factor of its precision"):
        Full(factor)
