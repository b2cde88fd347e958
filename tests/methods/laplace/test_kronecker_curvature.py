from __future__ import annotations

import torch

from hf_bayes.distributions.covariance import DiagonalBlock, Kronecker, KroneckerBlock, dense
from hf_bayes.methods.laplace.prior_precision import GaussianPrecision, temper
from tests.methods.laplace.curvatures import DIM, KINDS, basis, numbers


def test_an_elementwise_prior_adds_its_diagonal_to_kfac() -> None:
    curvature = KINDS["kronecker"]()
    precision = numbers(DIM).exp()
    left, right = basis(2), basis(3)
    rotation = torch.kron(left.contiguous(), right.contiguous())
    expected = (rotation.T @ torch.diag(precision[:6]) @ rotation).diagonal().view(2, 3)
    found = 1 / curvature.covariance(precision).blocks[0].variances - numbers(2, 3).exp()  # type: ignore[attr-defined]
    assert torch.allclose(found, expected, rtol=1e-9)


def test_merged_kronecker_blocks_keep_the_trace_and_fit_better() -> None:
    one = KINDS["kronecker"]()
    turned = torch.linalg.qr(numbers(3, 3).flip(0))[0]
    first = KroneckerBlock(basis(2).flip(0).contiguous(), turned, numbers(2, 3).neg().exp())
    before = Kronecker(
        (
            first,
            DiagonalBlock(numbers(4).exp()),
            KroneckerBlock(None, basis(2).flip(1).contiguous(), numbers(3, 2).exp()),
        )
    )
    old = torch.linalg.inv(dense(before, numbers(1)))
    expected = one.dense() + old
    found = torch.linalg.inv(dense(temper(one, GaussianPrecision(before), temperature=1.0, what="posterior"), old))
    assert torch.allclose(found.trace(), expected.trace(), rtol=1e-9)
    # what is not on the diagonal of the sum in a basis is lost: rotate into H's own basis, as if the prior had that one
    sides = (
        torch.kron(basis(2), basis(3)),
        torch.eye(4).double(),
        torch.kron(torch.eye(3).double(), basis(2).contiguous()),
    )
    own = torch.block_diag(*sides)
    twin = own @ torch.diag((own.T @ expected @ own).diagonal()) @ own.T
    assert (found - expected).norm() < (twin - expected).norm()
    assert (found - expected).norm() < 0.5 * (expected - one.dense()).norm()
