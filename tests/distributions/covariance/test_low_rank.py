from __future__ import annotations

import math

import pytest
import torch

from hf_bayes.distributions.covariance import LowRank, dense
from hf_bayes.distributions.covariance.base import gram
from tests.distributions.covariance.structures import LAYOUT, make, numbers


def test_columns_on_a_diagonal_are_what_they_add_up_to() -> None:
    std, columns = numbers(LAYOUT.dim).exp(), numbers(LAYOUT.dim, 3)
    expected = torch.diag(std**2) + columns @ columns.T
    assert torch.allclose(dense(LowRank.plus(std, columns), std), expected, rtol=1e-12)  # rounding, condition 1e2
    # float32 keeps the digits of a direction with far more variance than the other directions
    steep = LowRank.plus(torch.full((5,), 1e-4), torch.ones(5, 1))
    assert float(steep.log_det) == pytest.approx(4 * math.log(1e-8) + math.log(5 + 1e-8), rel=1e-6)


def test_a_basis_of_many_rows_is_orthonormal_and_loads() -> None:
    """A decomposition in float32 alone is orthonormal to about 2e-4 here, and to 2e-3 for ten million rows."""
    columns = torch.randn(1 << 21, 3, generator=torch.Generator().manual_seed(0))
    found = LowRank.plus(torch.ones(len(columns)), columns)
    assert (gram(found.basis) - torch.eye(3).double()).abs().max() < 1e-6
    assert torch.allclose(found.scale - 1, torch.linalg.eigvalsh(gram(columns)).flip(0).float(), rtol=1e-5)


def test_a_precision_that_is_not_positive_is_refused() -> None:
    with pytest.raises(ValueError, match=r"needs positive precisions, got shape \[2\], 1 of 2 not positive"):
        LowRank.less(torch.tensor([1.0, 0.0]), torch.ones(2, 1))


def test_truncation_keeps_steepest_directions_and_the_diagonal() -> None:
    precision, columns = numbers(6).exp(), numbers(6, 4) * torch.tensor([3.0, 0.1, 2.0, 0.2]).double()
    whole = LowRank.less(precision, columns)
    exact = torch.diag(precision) + columns @ columns.T
    assert torch.allclose(torch.linalg.inv(dense(whole, precision)), exact, rtol=1e-9)  # rounding, condition 1e3
    left, singular, _ = torch.linalg.svd(columns / precision.sqrt()[:, None], full_matrices=False)
    directions = left * singular * precision.sqrt()[:, None]
    kept = directions[:, :2] @ directions[:, :2].T
    dropped = exact - torch.diag(precision) - kept
    cut = whole.truncated(2)
    found = torch.linalg.inv(dense(cut, precision))
    assert cut.basis.shape == (6, 2)
    assert torch.allclose(found, torch.diag(precision) + kept + torch.diag(dropped.diagonal()), rtol=1e-9)
    assert torch.allclose(cut.precision_diagonal, whole.precision_diagonal, rtol=1e-9)
    twin = LowRank.less(precision, directions[:, :2])  # the other directions are dropped
    assert not torch.allclose(twin.precision_diagonal, whole.precision_diagonal, rtol=1e-3)
    assert whole.truncated(4) is whole
    with pytest.raises(ValueError, match="1 of 3 directions are wider than the diagonal part"):
        make("low_rank")[0].truncated(2)  # type: ignore[attr-defined]


def test_variances_stay_positive_where_columns_take_nearly_all() -> None:
    basis = torch.linalg.qr(numbers(6, 6).float()).Q  # a row has squares with the sum 1, up to rounding
    narrow = LowRank(torch.ones(6), basis, torch.full((6,), 1e-7))
    assert torch.allclose(narrow.variance, torch.full((6,), 1e-7), atol=1e-6, rtol=0)  # rounding of 1
    assert bool((narrow.variance > 0).all())
