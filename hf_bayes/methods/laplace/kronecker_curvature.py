"""The curvature in Kronecker-factored blocks, one for each random tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hf_bayes.distributions.covariance import Covariance, Kronecker, KroneckerBlock, marginal
from hf_bayes.methods.laplace.curvature import Curvature, require_positive


@dataclass(frozen=True, eq=False)
class KroneckerFactors:
    """H of one matrix [m, n], flattened row by row: (left (x) right) diag(eigenvalues) (left (x) right)'.

    Attributes:
        left: [m, m] eigenvectors of the left factor; None if the factor is diagonal.
        right: [n, n] eigenvectors of the right factor; None if the factor is diagonal.
        eigenvalues: [m, n] products of the factors' eigenvalues (K-FAC), or second moments in their basis (EK-FAC).
    """

    left: Tensor | None
    right: Tensor | None
    eigenvalues: Tensor

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


@dataclass(frozen=True, eq=False)
class KroneckerCurvature(Curvature):
    """A curvature with one block per random tensor: Kronecker factors, or a diagonal [n] for a tensor without them."""

    kind: ClassVar[str] = "kronecker"
    blocks: tuple[KroneckerFactors | Tensor, ...]

    @property
    def sizes(self) -> list[int]:
        return [len(b) if isinstance(b, Tensor) else b.eigenvalues.numel() for b in self.blocks]

    @property
    def dim(self) -> int:
        return sum(self.sizes)

    def scaled(self, factor: float) -> KroneckerCurvature:
        return KroneckerCurvature(
            tuple(
                factor * b if isinstance(b, Tensor) else KroneckerFactors(b.left, b.right, factor * b.eigenvalues)
                for b in self.blocks
            )
        )

    def dense(self) -> Tensor:
        parts = []
        for block in self.blocks:
            if isinstance(block, Tensor):
                parts.append(torch.diag(block))
                continue
            like = block.eigenvalues
            eyes = (torch.eye(size, dtype=like.dtype, device=like.device) for size in like.shape)
            left, right = (eye if b is None else b for eye, b in zip(eyes, (block.left, block.right), strict=True))
            basis = torch.kron(left.contiguous(), right.contiguous())
            parts.append(basis @ torch.diag(block.eigenvalues.flatten()) @ basis.mT)
        dense: Tensor = torch.block_diag(*parts)
        return dense

    def plus(self, prior: Covariance) -> tuple[Curvature, Tensor]:
        """Return the sum, with one Kronecker block in place of two (``_merged``)."""
        if not isinstance(prior, Kronecker):
            return super().plus(prior)
        blocks: list[KroneckerFactors | Tensor] = []
        rest = []
        for block, before in zip(self.blocks, prior.blocks, strict=True):
            if isinstance(block, KroneckerFactors) and isinstance(before, KroneckerBlock):
                blocks.append(
                    _merged(block, KroneckerFactors(before.left, before.right, before.variances.reciprocal()))
                )
                rest.append(torch.zeros_like(block.eigenvalues).flatten())
            else:
                blocks.append(block)
                rest.append(Kronecker((before,)).precision_diagonal)
        return KroneckerCurvature(tuple(blocks)), torch.cat(rest)

    @property
    def diagonal(self) -> Tensor:
        return torch.cat(
            [b if isinstance(b, Tensor) else marginal(b.left, b.right, b.eigenvalues).flatten() for b in self.blocks]
        )

    def _posterior(self, precision: Tensor) -> list[Tensor]:
        """Return the eigenvalues of H + tau of each block."""
        parts = [precision] * len(self.blocks) if precision.ndim == 0 else precision.split(self.sizes)
        pairs = zip(self.blocks, parts, strict=True)
        return [block + tau if isinstance(block, Tensor) else block.posterior(tau) for block, tau in pairs]

    def log_det(self, precision: Tensor) -> Tensor:
        return torch.stack([values.log().sum() for values in self._posterior(precision)]).sum()

    def covariance(self, precision: Tensor, *, temperature: float = 1.0) -> Kronecker:
        blocks: list[KroneckerBlock | Tensor] = []
        for block, values in zip(self.blocks, self._posterior(precision), strict=True):
            variances = temperature / require_positive(values)
            if isinstance(block, Tensor):
                blocks.append(variances.sqrt())
            else:
                blocks.append(KroneckerBlock(block.left, block.right, variances))
        return Kronecker(tuple(blocks))


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
    total = sum(torch.diag(values) if basis is None else (basis * values) @ basis.mT for basis, values in parts)
    assert isinstance(total, Tensor)
    vectors: Tensor = torch.linalg.eigh(total).eigenvectors
    return vectors


def _change_of_basis(new: Tensor | None, old: Tensor | None) -> Tensor | None:
    """Return new' old, which maps coordinates in the old basis to coordinates in the new one."""
    if new is None:
        return old
    return new.mT if old is None else new.mT @ old
