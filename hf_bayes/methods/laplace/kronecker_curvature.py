"""The curvature in Kronecker-factored blocks, one for each random tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from hf_bayes.distributions.covariance import Covariance, DiagonalBlock, Kronecker, KroneckerBlock, marginal
from hf_bayes.methods.laplace.curvature import Curvature, DiagonalCurvature, require_positive


@dataclass(frozen=True, eq=False)
class KroneckerFactors(Curvature):
    """H of one matrix [m, n], flattened row by row: (left (x) right) diag(eigenvalues) (left (x) right)'.

    Attributes:
        left: [m, m] eigenvectors of the left factor; None if the factor is diagonal.
        right: [n, n] eigenvectors of the right factor; None if the factor is diagonal.
        eigenvalues: [m, n] products of the factors' eigenvalues (K-FAC), or second moments in their basis (EK-FAC).
    """

    kind: ClassVar[str] = "kronecker_factors"
    left: Tensor | None
    right: Tensor | None
    eigenvalues: Tensor

    @property
    def dim(self) -> int:
        return self.eigenvalues.numel()

    def scaled(self, factor: float) -> KroneckerFactors:
        return replace(self, eigenvalues=factor * self.eigenvalues)

    def dense(self) -> Tensor:
        like = self.eigenvalues
        eyes = (torch.eye(size, dtype=like.dtype, device=like.device) for size in like.shape)
        left, right = (eye if b is None else b for eye, b in zip(eyes, (self.left, self.right), strict=True))
        basis = torch.kron(left.contiguous(), right.contiguous())
        return basis @ torch.diag(like.flatten()) @ basis.mT

    @property
    def diagonal(self) -> Tensor:
        return marginal(self.left, self.right, self.eigenvalues).flatten()

    def posterior(self, precision: Tensor) -> Tensor:
        """Return the eigenvalues of H + tau, [m, n].

        If tau varies within the matrix, its diagonal in this basis replaces it. No other matrix with this basis is
        closer to tau in Frobenius norm. A constant tau does not change.
        """
        if precision.ndim == 0:
            return self.eigenvalues + precision
        tau = precision.view(self.eigenvalues.shape)
        tau = tau if self.left is None else self.left.square().mT @ tau
        return self.eigenvalues + (tau if self.right is None else tau @ self.right.square())

    def log_det(self, precision: Tensor) -> Tensor:
        return self.posterior(precision).log().sum()

    def covariance(self, precision: Tensor, *, temperature: float = 1.0) -> KroneckerBlock:
        return KroneckerBlock(self.left, self.right, temperature / require_positive(self.posterior(precision)))

    def plus(self, prior: Covariance) -> tuple[KroneckerFactors, Tensor]:
        """Return the sum with another Kronecker block as one block (``_merged``)."""
        if not isinstance(prior, KroneckerBlock):
            return self, prior.precision_diagonal
        before = KroneckerFactors(prior.left, prior.right, prior.variances.reciprocal())
        return _merged(self, before), torch.zeros_like(self.eigenvalues).flatten()


@dataclass(frozen=True, eq=False)
class DiagonalFactor(DiagonalCurvature):
    """H of a tensor without Kronecker factors: diag(values)."""

    def covariance(self, precision: Tensor, *, temperature: float = 1.0) -> DiagonalBlock:
        return DiagonalBlock(super().covariance(precision, temperature=temperature).std)

    def plus(self, prior: Covariance) -> tuple[DiagonalFactor, Tensor]:
        return self, prior.precision_diagonal


@dataclass(frozen=True, eq=False)
class KroneckerCurvature(Curvature):
    """A curvature with one block per random tensor: Kronecker factors, or a diagonal for a tensor without them."""

    kind: ClassVar[str] = "kronecker"
    blocks: tuple[KroneckerFactors | DiagonalFactor, ...]

    @property
    def dim(self) -> int:
        return sum(block.dim for block in self.blocks)

    def scaled(self, factor: float) -> KroneckerCurvature:
        return KroneckerCurvature(tuple(block.scaled(factor) for block in self.blocks))

    def dense(self) -> Tensor:
        dense: Tensor = torch.block_diag(*(block.dense() for block in self.blocks))
        return dense

    def plus(self, prior: Covariance) -> tuple[Curvature, Tensor]:
        """Return the sum block by block; one Kronecker block takes the place of two."""
        if not isinstance(prior, Kronecker):
            return super().plus(prior)
        sums = [block.plus(before) for block, before in zip(self.blocks, prior.blocks, strict=True)]
        return KroneckerCurvature(tuple(block for block, _ in sums)), torch.cat([rest for _, rest in sums])

    @property
    def diagonal(self) -> Tensor:
        return torch.cat([block.diagonal for block in self.blocks])

    def log_det(self, precision: Tensor) -> Tensor:
        return torch.stack([block.log_det(tau) for block, tau in self._pieces(precision)]).sum()

    def covariance(self, precision: Tensor, *, temperature: float = 1.0) -> Kronecker:
        return Kronecker(
            tuple(block.covariance(tau, temperature=temperature) for block, tau in self._pieces(precision))
        )

    def _pieces(self, precision: Tensor) -> Iterator[tuple[KroneckerFactors | DiagonalFactor, Tensor]]:
        """Yield each block with its part of tau."""
        sizes = [block.dim for block in self.blocks]
        return zip(
            self.blocks, [precision] * len(sizes) if precision.ndim == 0 else precision.split(sizes), strict=True
        )


def _merged(one: KroneckerFactors, other: KroneckerFactors) -> KroneckerFactors:
    """Return the sum of two blocks as one block.

    It is the diagonal of the sum in the eigenbases of its partial traces over rows and columns. It is exact if both
    blocks have the same basis. Otherwise it keeps the trace, and no other matrix in this basis is closer (Frobenius).
    """
    left = _basis_of_sum([(part.left, part.eigenvalues.sum(1)) for part in (one, other)])
    right = _basis_of_sum([(part.right, part.eigenvalues.sum(0)) for part in (one, other)])
    values = torch.zeros_like(one.eigenvalues)
    for part in (one, other):
        values = values + marginal(
            _change_of_basis(left, part.left), _change_of_basis(right, part.right), part.eigenvalues
        )
    return KroneckerFactors(left, right, values)


def _basis_of_sum(parts: Sequence[tuple[Tensor | None, Tensor]]) -> Tensor | None:
    """Return the eigenvectors of sum B diag(values) B'; None if all B are the identity."""
    if all(basis is None for basis, _ in parts):
        return None
    dense = [torch.diag(values) if basis is None else (basis * values) @ basis.mT for basis, values in parts]
    total = torch.stack(dense).sum(0)
    vectors: Tensor = torch.linalg.eigh(total).eigenvectors
    return vectors


def _change_of_basis(new: Tensor | None, old: Tensor | None) -> Tensor | None:
    """Return new' old, which maps coordinates in the old basis to coordinates in the new one."""
    if new is None:
        return old
    return new.mT if old is None else new.mT @ old
