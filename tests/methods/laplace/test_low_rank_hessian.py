from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hf_bayes.distributions.covariance import dense
from hf_bayes.methods.laplace.curvature import NotPositiveDefinite
from hf_bayes.methods.laplace.low_rank_hessian import LowRankHessian, low_rank_hessian
from tests.methods.laplace.curvatures import basis, numbers

ZERO = torch.zeros((), dtype=torch.float64)


def product_with(matrix: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda vectors: vectors @ matrix


def spiked(dim: int, rank: int, floor: float = 2.0) -> Tensor:
    """Return floor I plus ``rank`` directions of more curvature."""
    columns = basis(dim)[:, :rank] * torch.arange(1, rank + 1, dtype=torch.float64)
    return columns @ columns.mT + floor * torch.eye(dim, dtype=torch.float64)


@pytest.mark.parametrize("dim", [6, 60])  # the dense way, and Lanczos
def test_few_directions_above_a_floor_are_found_exactly(dim: int) -> None:
    matrix = spiked(dim, 3)
    found = low_rank_hessian(product_with(matrix), matrix[0], 3)
    # eigenvalues to rounding; eigenvectors are multiplied by their distance from the floor
    assert torch.allclose(found.dense(), matrix, atol=1e-12)
    assert float(found.lowest) == pytest.approx(2.0, rel=1e-3)
    assert torch.allclose(found.diagonal, matrix.diagonal(), atol=1e-12)
    precision = numbers(dim).exp()
    posterior = matrix + torch.diag(precision)
    assert torch.allclose(dense(found.covariance(precision), matrix), posterior.inverse(), atol=1e-12)
    assert float(found.log_det(precision)) == pytest.approx(float(posterior.logdet()), rel=1e-12)
    assert torch.allclose(found.scaled(3.0).dense(), 3 * matrix, atol=1e-12)


@pytest.mark.parametrize("dim", [12, 60])
def test_the_trace_of_the_rest_is_kept(dim: int) -> None:
    matrix = numbers(dim, dim) @ numbers(dim, dim).mT + torch.eye(dim, dtype=torch.float64)
    found = low_rank_hessian(product_with(matrix), matrix[0], 4)
    values = torch.linalg.eigvalsh(matrix)
    # 4 standard errors of 16 probes: the spread of the eigenvalues is about their mean
    tolerance = 1e-10 if dim == 12 else 4 * float((2 * values[:-4].square().sum() / 16).sqrt() / (dim - 4))
    assert float(found.rest) == pytest.approx(float(values[:-4].mean()), abs=tolerance)
    kept = torch.linalg.eigvalsh(found.dense())[-4:]
    assert torch.allclose(kept, values[-4:], rtol=1e-10)


@pytest.mark.parametrize("dim", [10, 60])
def test_a_negative_eigenvalue_is_refused_by_its_value(dim: int) -> None:
    matrix = spiked(dim, 3)
    direction = basis(dim)[:, 5:6]
    matrix = matrix - 5 * direction @ direction.mT
    found = low_rank_hessian(product_with(matrix), matrix[0], 3, hessian="energy")
    with pytest.raises(NotPositiveDefinite, match=r"not positive definite .*lowest -3\).*add a proper prior"):
        found.covariance(ZERO)
    found.covariance(ZERO + 3.01)  # a prior that is strong enough


def test_a_rank_of_d_keeps_everything() -> None:
    matrix = spiked(5, 3)
    found = low_rank_hessian(product_with(matrix), matrix[0], 32)
    assert torch.allclose(found.dense(), matrix, atol=1e-12)


def test_a_singular_hessian_needs_a_prior() -> None:
    columns = numbers(30, 2)
    found = low_rank_hessian(product_with(columns @ columns.mT), columns[:, 0], 2)
    with pytest.raises(NotPositiveDefinite):
        LowRankHessian(found.columns, ZERO, ZERO, hessian=True).covariance(ZERO)
    assert torch.allclose(
        dense(found.covariance(ZERO + 1), columns), (columns @ columns.mT + torch.eye(30)).inverse(), atol=1e-12
    )
