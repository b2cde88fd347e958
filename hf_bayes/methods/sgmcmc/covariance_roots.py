"""Roots S of covariances, S S' = Sigma, of several chains in one tensor [M, P], as a sampler's state holds them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from hf_bayes.core.types import Prior
from hf_bayes.distributions.covariance import Covariance, Full, Kronecker
from hf_bayes.methods.laplace.prior_precision import precision_of

Shapes = Sequence[tuple[int, ...]]
"""The shapes of the random tensors, in the order of theta."""


class Roots(Protocol):
    """One structure of S.

    Attributes:
        size: P, numbers of a chain.
    """

    size: int

    def pack(self, covariance: Covariance) -> Tensor:
        """Return S of a covariance, [P]."""
        ...

    def product(self, packed: Tensor, vectors: Tensor) -> Tensor:
        """Return S v, [M, d] -> [M, d]."""
        ...

    def transposed(self, packed: Tensor, vectors: Tensor) -> Tensor:
        """Return S' g, [M, d] -> [M, d]."""
        ...

    def along_axes(self, packed: Tensor, vectors: Tensor) -> Tensor:
        """Return vectors of the coordinates v along the eigenvectors of S' S, [M, d] -> [M, d]."""
        ...

    def variances(self, packed: Tensor) -> Tensor:
        """Return the eigenvalues of S' S, [M, d]."""
        ...

    def of_prior(self, variance: Tensor) -> Tensor:
        """Return the variances [d] of an independent prior along these eigenvectors, means over rotated tensors."""
        ...


class DiagonalRoots:
    """S is diagonal: the standard deviation of each element."""

    def __init__(self, shapes: Shapes) -> None:
        self.size = sum(map(math.prod, shapes))

    def pack(self, covariance: Covariance) -> Tensor:
        return covariance.variance.sqrt()

    def product(self, packed: Tensor, vectors: Tensor) -> Tensor:
        return packed * vectors

    def transposed(self, packed: Tensor, vectors: Tensor) -> Tensor:
        return packed * vectors

    def along_axes(self, packed: Tensor, vectors: Tensor) -> Tensor:
        return vectors

    def variances(self, packed: Tensor) -> Tensor:
        return packed.square()

    def of_prior(self, variance: Tensor) -> Tensor:
        return variance


class FullRoots:
    """S is dense, Q diag(stds) Q', over all tensors at once. It is symmetric, as in ``KroneckerRoots``.

    A chain's numbers are the stds [d] and Q [d, d].
    """

    def __init__(self, shapes: Shapes) -> None:
        self._dim = sum(map(math.prod, shapes))
        self.size = self._dim * (1 + self._dim)

    def pack(self, covariance: Covariance) -> Tensor:
        assert isinstance(covariance, Full)
        factor = covariance.precision_cholesky
        # in float64: directions that the data do not reach have one singular value, the prior's, and in float32 LAPACK
        # then fails to converge now and then
        basis, inverse_stds, _ = torch.linalg.svd(factor.double())
        return torch.cat([1 / inverse_stds, basis.flatten()]).to(factor)

    def product(self, packed: Tensor, vectors: Tensor) -> Tensor:
        stds, basis = self._split(packed)
        return _times(basis, stds * _times(basis.mT, vectors))

    def transposed(self, packed: Tensor, vectors: Tensor) -> Tensor:
        return self.product(packed, vectors)

    def along_axes(self, packed: Tensor, vectors: Tensor) -> Tensor:
        return _times(self._split(packed)[1].mT, vectors)

    def variances(self, packed: Tensor) -> Tensor:
        return self._split(packed)[0].square()

    def of_prior(self, variance: Tensor) -> Tensor:
        return variance.mean().expand_as(variance)

    def _split(self, packed: Tensor) -> tuple[Tensor, Tensor]:
        stds, basis = packed.split([self._dim, self._dim**2], 1)
        return stds, basis.unflatten(1, (self._dim, self._dim))


class KroneckerRoots:
    """S has a block for each tensor: Q diag(stds) Q' with Q = left (x) right for a matrix, else diag(stds).

    S is symmetric, so that a chain does not depend on the choice of eigenvectors. Their signs are arbitrary, and so is
    a basis of the directions that no gradient reaches: processes and devices that round otherwise find others.

    A chain's numbers are, tensor by tensor, the stds [m n], left [m, m] and right [n, n]. A side without a basis has
    the identity.
    """

    def __init__(self, shapes: Shapes) -> None:
        self._shapes = tuple(shapes)
        self._parts = [
            (math.prod(shape), *(side * side for side in shape if len(shape) == 2)) for shape in self._shapes
        ]
        self.size = sum(map(sum, self._parts))

    def pack(self, covariance: Covariance) -> Tensor:
        assert isinstance(covariance, Kronecker)
        found: list[Tensor] = []
        for shape, block in zip(self._shapes, covariance.blocks, strict=True):
            stds = block.eigenvalues.sqrt()
            found.append(stds.flatten())
            if len(shape) == 2:
                bases = zip((block.left, block.right), shape, strict=True)
                found += [(torch.eye(side).to(stds) if basis is None else basis).flatten() for basis, side in bases]
        return torch.cat(found)

    def product(self, packed: Tensor, vectors: Tensor) -> Tensor:
        return torch.cat(
            [
                _rotated(stds * _rotated(piece, shape, bases, back=False), shape, bases, back=True)
                for shape, stds, bases, piece in self._blocks(packed, vectors)
            ],
            1,
        )

    def transposed(self, packed: Tensor, vectors: Tensor) -> Tensor:
        return self.product(packed, vectors)

    def along_axes(self, packed: Tensor, vectors: Tensor) -> Tensor:
        return torch.cat(
            [_rotated(piece, shape, bases, back=False) for shape, _, bases, piece in self._blocks(packed, vectors)],
            1,
        )

    def variances(self, packed: Tensor) -> Tensor:
        return torch.cat([stds.square() for stds, *_ in self._split(packed)], 1)

    def of_prior(self, variance: Tensor) -> Tensor:
        pieces = variance.split([math.prod(shape) for shape in self._shapes])
        rotated = (len(shape) == 2 for shape in self._shapes)
        return torch.cat([p.mean().expand_as(p) if mixed else p for p, mixed in zip(pieces, rotated, strict=True)])

    def _split(self, packed: Tensor) -> Iterator[list[Tensor]]:
        """Yield [stds, left, right] or [stds] of each tensor, [M, ...] each and flat."""
        numbers = iter(packed.split([size for part in self._parts for size in part], 1))
        for part in self._parts:
            yield [next(numbers) for _ in part]

    def _blocks(
        self, packed: Tensor, vectors: Tensor
    ) -> Iterator[tuple[tuple[int, ...], Tensor, list[Tensor], Tensor]]:
        pieces = vectors.split([part[0] for part in self._parts], 1)
        for shape, (stds, *bases), piece in zip(self._shapes, self._split(packed), pieces, strict=True):
            square = [basis.unflatten(1, (side, side)) for basis, side in zip(bases, shape, strict=False)]
            yield shape, stds, square, piece


ROOTS: dict[str, Callable[[Shapes], Roots]] = {
    "diagonal": DiagonalRoots,
    "kronecker": KroneckerRoots,
    "full": FullRoots,
}
"""Structure of a curvature -> the structure of S."""


def _times(matrices: Tensor, vectors: Tensor) -> Tensor:
    """Return the products [M, d] of matrices [M, d, d] with vectors [M, d]."""
    return (matrices @ vectors[..., None])[..., 0]


def _rotated(flat: Tensor, shape: tuple[int, ...], bases: list[Tensor], *, back: bool) -> Tensor:
    """Return left' V right of V [M, m n], or left V right' if ``back``; V itself without bases."""
    if not bases:
        return flat
    left, right = bases
    matrices = flat.unflatten(1, shape)
    rotated: Tensor = left @ matrices @ right.mT if back else left.mT @ matrices @ right
    return rotated.flatten(1)


def informed_by_data(roots: Roots, packed: Tensor, prior: Prior) -> Tensor:
    """Return the directions [M, d] in which H > tau: S S' < half the prior's variance. All where there are none."""
    variances = roots.variances(packed)
    variance = precision_of(prior, variances[0]).variance
    informed: Tensor = variances < roots.of_prior(variance) / 2
    return informed | ~informed.any(1, keepdim=True)
