from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_bayes.distributions.covariance import Covariance, Diagonal, Full, Kronecker, dense
from hf_bayes.distributions.covariance.kronecker import DiagonalBlock, KroneckerBlock
from hf_bayes.methods.sgmcmc.covariance_roots import DiagonalRoots, FullRoots, KroneckerRoots, Roots

SHAPES = ((3, 2), (4,), (2, 3))


def kronecker() -> Kronecker:
    torch.manual_seed(0)
    left, right = (torch.linalg.qr(torch.randn(n, n, dtype=torch.float64))[0] for n in (3, 2))
    variances = torch.rand(3, 2, dtype=torch.float64) + 0.1
    one_sided = KroneckerBlock(None, torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64))[0], variances.T.clone())
    stds = DiagonalBlock(torch.rand(4, dtype=torch.float64) + 0.1)
    return Kronecker((KroneckerBlock(left, right, variances), stds, one_sided))


def full() -> Full:
    torch.manual_seed(1)
    factor = torch.randn(16, 16, dtype=torch.float64).tril(-1) / 4
    return Full(factor + torch.linspace(0.5, 2, 16, dtype=torch.float64).diag())


CASES: list[tuple[Roots, Covariance]] = [
    (DiagonalRoots(SHAPES), Diagonal(torch.linspace(0.1, 2, 16, dtype=torch.float64))),
    (KroneckerRoots(SHAPES), kronecker()),
    (FullRoots(SHAPES), full()),
]


@pytest.mark.parametrize(("roots", "covariance"), CASES, ids=["diagonal", "kronecker", "full"])
class TestRoots:
    def _root(self, roots: Roots, packed: Tensor) -> Tensor:
        """Return S as a matrix."""
        return torch.stack([roots.product(packed, column[None])[0] for column in torch.eye(16).double()], 1)

    def test_the_root_times_its_transpose_is_the_covariance(self, roots: Roots, covariance: Covariance) -> None:
        packed = roots.pack(covariance)[None]
        root = self._root(roots, packed)
        torch.testing.assert_close(root @ root.T, dense(covariance, packed), rtol=0, atol=1e-14)
        assert packed.shape == (1, roots.size)

    def test_transposed_is_the_transpose_of_the_product(self, roots: Roots, covariance: Covariance) -> None:
        packed = roots.pack(covariance)[None]
        found = torch.stack([roots.transposed(packed, column[None])[0] for column in torch.eye(16).double()], 1)
        torch.testing.assert_close(found, self._root(roots, packed).T, rtol=0, atol=1e-14)

    def test_variances_are_the_eigenvalues_of_the_covariance(self, roots: Roots, covariance: Covariance) -> None:
        packed = roots.pack(covariance)[None]
        expected = torch.linalg.eigvalsh(dense(covariance, packed))
        torch.testing.assert_close(roots.variances(packed)[0].sort().values, expected, rtol=1e-10, atol=0)

    def test_variances_belong_to_the_directions_along_the_axes(self, roots: Roots, covariance: Covariance) -> None:
        packed, vectors = roots.pack(covariance)[None], torch.linspace(-1, 2, 16, dtype=torch.float64)[None]
        found = roots.along_axes(packed, roots.transposed(packed, roots.product(packed, vectors)))
        expected = roots.variances(packed) * roots.along_axes(packed, vectors)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)
        assert float(roots.along_axes(packed, vectors).norm()) == pytest.approx(float(vectors.norm()), rel=1e-14)

    def test_each_chain_has_its_own_root(self, roots: Roots, covariance: Covariance) -> None:
        packed = torch.stack([roots.pack(covariance)] * 2)
        # the standard deviations: of all elements, or of the first matrix
        packed[1, : 3 * 2 if isinstance(roots, KroneckerRoots) else 16] *= 3
        vectors = torch.randn(1, 16, dtype=torch.float64).expand(2, -1)
        both = roots.product(packed, vectors)
        torch.testing.assert_close(both[1, :6], 3 * both[0, :6], rtol=1e-12, atol=1e-12)


def test_the_root_does_not_depend_on_the_choice_of_eigenvectors() -> None:
    """Eigenvectors have arbitrary signs, and any basis of a space with one eigenvalue."""
    torch.manual_seed(0)
    left, turn = (torch.linalg.qr(torch.randn(n, n, dtype=torch.float64))[0] for n in (3, 2))
    variances = torch.tensor([[0.3, 0.2], [0.5, 0.5], [0.5, 0.5]], dtype=torch.float64)
    other = torch.cat([-left[:, :1], left[:, 1:] @ turn], 1)
    roots, vectors = KroneckerRoots(((3, 2),)), torch.eye(6, dtype=torch.float64)
    one, two = (
        roots.pack(Kronecker((KroneckerBlock(basis, None, variances),))).expand(6, -1) for basis in (left, other)
    )
    assert float((one - two).abs().max()) > 0.1
    torch.testing.assert_close(roots.product(two, vectors), roots.product(one, vectors), rtol=0, atol=1e-14)


def test_a_rotated_tensor_has_the_mean_of_the_priors_variances() -> None:
    variance = torch.arange(1.0, 17.0)
    assert torch.equal(DiagonalRoots(SHAPES).of_prior(variance), variance)
    found = KroneckerRoots(SHAPES).of_prior(variance)
    assert FullRoots(SHAPES).of_prior(variance).tolist() == [8.5] * 16
    assert found.tolist() == [3.5] * 6 + [7.0, 8.0, 9.0, 10.0] + [13.5] * 6


def test_a_full_root_is_decomposed_in_float64() -> None:
    """In float32, LAPACK fails to converge for some factors, and small stds lose digits."""
    torch.manual_seed(0)
    factor = 100 * torch.randn(16, 16).tril(-1) + torch.logspace(0, 3, 16).diag()
    found = FullRoots(SHAPES).pack(Full(factor))
    exact = 1 / torch.linalg.svdvals(factor.double())
    assert found.dtype == torch.float32
    # the rounding of float32 alone; its own decomposition has 6e-8 * 1e3, the condition number
    torch.testing.assert_close(found[:16].double(), exact, rtol=1.2e-7, atol=0)
