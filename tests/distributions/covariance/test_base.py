from __future__ import annotations

import pytest
import torch

from hf_bayes.distributions.approximations import Gaussian
from hf_bayes.distributions.covariance.base import check_orthonormal, check_shapes, dense, faults, log_normal, moved
from tests.distributions.covariance.structures import LAYOUT, kinds, make, numbers


@kinds
def test_log_normal_is_the_density_of_torch_distributions(kind: str) -> None:
    covariance, precision = make(kind)
    points = 0.1 * numbers(3, LAYOUT.dim, seed=4)
    zero = torch.zeros(LAYOUT.dim, dtype=torch.float64)
    expected = torch.distributions.MultivariateNormal(zero, precision_matrix=precision).log_prob(points)
    assert torch.allclose(log_normal(covariance, points), expected, rtol=1e-9)  # float64 solves, condition below 1e5


@kinds
def test_moved_changes_the_dtype_of_every_tensor(kind: str) -> None:
    covariance, _ = make(kind)
    single = moved(Gaussian(numbers(1, LAYOUT.dim), (covariance,)), torch.zeros((), dtype=torch.float32))
    assert single.means.dtype == dense(single.covariances[0], single.means).dtype == torch.float32
    assert {value.dtype for value in single.covariances[0].tensors(LAYOUT).values()} == {torch.float32}
    assert moved("text", torch.zeros(1)) == "text"


def test_tensors_need_the_expected_names_and_shapes() -> None:
    tensors = {"a": torch.zeros(2, 3)}
    check_shapes(tensors, {"a": (3,)}, lead=(2,))
    with pytest.raises(ValueError, match=r"a: expected shape \[3\], got \[2, 3\]"):
        check_shapes(tensors, {"a": (3,)})
    with pytest.raises(ValueError, match=r"missing tensors \['b'\], unknown tensors \['a'\]"):
        check_shapes(tensors, {"b": (3,)})


def test_columns_that_are_not_orthonormal_are_refused() -> None:
    check_orthonormal("left", torch.eye(3)[:, :2])
    with pytest.raises(ValueError, match=r"left has no orthonormal columns \(off by 3\): it is no eigenbasis"):
        check_orthonormal("left", 2 * torch.eye(3))


def test_values_that_are_not_positive_are_counted() -> None:
    assert faults(torch.tensor([1.0, 0.0, torch.nan])) == "shape [3], 2 of 3 not positive"
