"""H, the curvature of -log p(D | theta) on the full data, in the structures that a posterior can be made of.

The posterior's precision is H + tau with tau the prior's: elementwise, or another Gaussian's (``Curvature.plus``). T is
as in docs/scale.md: tempering the posterior gives the covariance T (H + tau)^-1, tempering the likelihood
(H / T + tau)^-1.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from hf_bayes.distributions.covariance import (
    Covariance,
    Diagonal,
    Full,
    Kronecker,
    KroneckerBlock,
    LowRank,
    marginal,
)


class NotPositiveDefinite(ValueError):
    """H + tau has eigenvalues that are not positive: there is no Gaussian, and no evidence."""


class Curvature(ABC):
    """H [d, d], symmetric. ``precision`` is tau, [d] or a scalar tensor, everywhere below.

    Attributes:
        hessian: whether it is one, which may have negative eigenvalues; the others are sums of squares.
    """

    kind: ClassVar[str]
    hessian: bool = False

    @property
    @abstractmethod
    def dim(self) -> int:
        """d"""

    @abstractmethod
    def scaled(self, factor: float) -> Self:
        """factor * H"""

    @abstractmethod
    def dense(self) -> Tensor:
        """[d, d]; for small d."""

    @property
    @abstractmethod
    def diagonal(self) -> Tensor:
        """[d]"""

    @abstractmethod
    def log_det(self, precision: Tensor) -> Tensor:
        """log det(H + tau), differentiable in tau; NaN or infinite where H + tau is not positive definite."""

    @abstractmethod
    def covariance(self, precision: Tensor, *, temperature: float = 1.0) -> Covariance:
        """temperature * (H + tau)^-1.

        Raises:
            NotPositiveDefinite: if H + tau is not.
        """

    def draws(self, precision: Tensor, noise: Tensor, *, temperature: float = 1.0) -> Tensor:
        """[M, d]: what ``covariance(precision).root`` makes of standard normals [M, d], differentiable in tau."""
        return self.covariance(precision, temperature=temperature).root(noise)

    def plus(self, prior: Covariance) -> tuple[Curvature, Tensor]:
        """H' of this structure and tau [d] whose sum is H + Sigma^-1, as far as the structure can hold Sigma^-1.

        Otherwise, and here, it is the diagonal of Sigma^-1 that is added.
        """
        return self, prior.precision_diagonal


def temper(curvature: Curvature, precision: Tensor | Covariance, *, temperature: float, what: str) -> Covariance:
    """The posterior's covariance at T: T (H + tau)^-1 for ``what="posterior"``, (H / T + tau)^-1 for "likelihood".

    Args:
        precision: tau, elementwise, or the covariance of a prior.
    """
    if what == "likelihood":
        curvature, temperature = curvature.scaled(1 / temperature), 1.0
    if isinstance(precision, Covariance):
        curvature, precision = curvature.plus(precision)
    return curvature.covariance(precision, temperature=temperature)


def temper_draws(curvature: Curvature, precision: Tensor, noise: Tensor, *, temperature: float, what: str) -> Tensor:
    """[M, d]: what the root of ``temper(curvature, precision)`` makes of standard normals, differentiable in tau."""
    if what == "likelihood":
        curvature, temperature = curvature.scaled(1 / temperature), 1.0
    return curvature.draws(precision, noise, temperature=temperature)


@dataclass(frozen=True, eq=False)
class DiagonalCurvature(Curvature):
    """diag(values)."""

    kind: ClassVar[str] = "diagonal"
    values: Tensor
    """[d]"""
    hessian: bool = False

    @property
    def dim(self) -> int:
        return len(self.values)

    def scaled(self, factor: float) -> DiagonalCurvature:
        return replace(self, values=factor * self.values)

    def dense(self) -> Tensor:
        return torch.diag(self.values)

    @property
    def diagonal(self) -> Tensor:
        return self.values

    def log_det(self, precision: Tensor) -> Tensor:
        return (self.values + precision).log().sum()

    def covariance(self, precision: Tensor, *, temperature: float = 1.0) -> Diagonal:
        return Diagonal((temperature / _positive(self.values + precision, hessian=self.hessian)).sqrt())


@dataclass(frozen=True, eq=False)
class KroneckerFactors:
    """H of one matrix [m, n], row by row: (left (x) right) diag(eigenvalues) (left (x) right)'.

    Attributes:
        left: [m, m] eigenvectors of its factor; None if the factor is diagonal.
        right: [n, n] likewise.
        eigenvalues: [m, n]: products of the factors' (K-FAC), or the second moments in their basis (EK-FAC).
    """

    left: Tensor | None
    right: Tensor | None
    eigenvalues: Tensor

    def posterior(self, precision: Tensor) -> Tensor:
        """[m, n]: eigenvalues of H + tau. Of a tau that varies within the matrix, its diagonal in this basis is taken.

        That diagonal is the closest to tau, in Frobenius norm, that keeps the basis; of a constant tau it is tau.
        """
        if precision.ndim == 0:
            return self.eigenvalues + precision
        spread = precision.view(self.eigenvalues.shape)
        spread = spread if self.left is None else self.left.square().mT @ spread
        return self.eigenvalues + (spread if self.right is None else spread @ self.right.square())


@dataclass(frozen=True, eq=False)
class KroneckerCurvature(Curvature):
    """One block for each random tensor: Kronecker factors, or the diagonal [n] where a tensor has none."""

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
        return torch.block_diag(*parts)

    def plus(self, prior: Covariance) -> tuple[Curvature, Tensor]:
        """Of two Kronecker blocks one, in the eigenbasis of the sums of their factors' traces (``_merged``)."""
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
        spread = [precision] * len(self.blocks) if precision.ndim == 0 else precision.split(self.sizes)
        pairs = zip(self.blocks, spread, strict=True)
        return [block + tau if isinstance(block, Tensor) else block.posterior(tau) for block, tau in pairs]

    def log_det(self, precision: Tensor) -> Tensor:
        return torch.stack([values.log().sum() for values in self._posterior(precision)]).sum()

    def covariance(self, precision: Tensor, *, temperature: float = 1.0) -> Kronecker:
        blocks: list[KroneckerBlock | Tensor] = []
        for block, values in zip(self.blocks, self._posterior(precision), strict=True):
            variances = temperature / _positive(values)
            if isinstance(block, Tensor):
                blocks.append(variances.sqrt())
            else:
                blocks.append(KroneckerBlock(block.left, block.right, variances))
        return Kronecker(tuple(blocks))


@dataclass(frozen=True, eq=False)
class LowRankCurvature(Curvature):
    """U U'."""

    kind: ClassVar[str] = "low_rank"
    columns: Tensor
    """[d, r] U"""

    @property
    def dim(self) -> int:
        return len(self.columns)

    def scaled(self, factor: float) -> LowRankCurvature:
        return LowRankCurvature(factor**0.5 * self.columns)

    def dense(self) -> Tensor:
        return self.columns @ self.columns.mT

    @property
    def diagonal(self) -> Tensor:
        return self.columns.square().sum(1)

    def log_det(self, precision: Tensor) -> Tensor:
        precision = precision.expand(self.dim)
        inner = self.columns.mT @ (self.columns / precision[:, None])  # matrix determinant lemma
        return precision.log().sum() + torch.logdet(inner + torch.eye(len(inner), dtype=inner.dtype).to(inner.device))

    def plus(self, prior: Covariance) -> tuple[Curvature, Tensor]:
        """Exact for a low-rank prior that is nowhere wider than its diagonal part: the ranks add up."""
        if not isinstance(prior, LowRank) or bool((prior.scale > 1).any()):
            return super().plus(prior)
        before = prior.basis * (1 / prior.scale - 1).sqrt() / prior.std[:, None]
        return LowRankCurvature(torch.cat([self.columns, before], 1)), prior.std.square().reciprocal()

    def covariance(self, precision: Tensor, *, temperature: float = 1.0) -> LowRank:
        found = LowRank.less(_positive(precision.expand(self.dim)), self.columns)
        return replace(found, std=temperature**0.5 * found.std)

    def draws(self, precision: Tensor, noise: Tensor, *, temperature: float = 1.0) -> Tensor:
        """S (I + B B')^-1/2 noise with S = tau^-1/2, B = S U: ``LowRank.root``, without the eigenvectors of B B'."""
        std = precision.expand(self.dim).rsqrt()
        columns = std[:, None] * self.columns
        inner = _Shrinkage.apply(columns.mT @ columns)
        return temperature**0.5 * std * (noise + (noise @ columns) @ inner @ columns.mT)


class _Shrinkage(torch.autograd.Function):
    """g(A) of a symmetric A [r, r] with g(x) = ((1 + x)^-1/2 - 1) / x, so that (I + B B')^-1/2 = I + B g(B'B) B'.

    In s = (1 + x)^1/2 it is -1 / (s (s + 1)), and divided differences cancel nothing: the gradient (Daleckii and Krein
    1965) knows no equal eigenvalues, of which that of an eigenvector makes 0 / 0.
    """

    @staticmethod
    def forward(ctx: Any, matrix: Tensor) -> Tensor:
        values, basis = torch.linalg.eigh(matrix)
        root = (1 + values.clamp_min(0)).sqrt()
        ctx.save_for_backward(root, basis)
        return -(basis / (root * (root + 1))) @ basis.mT

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Tensor:
        root, basis = ctx.saved_tensors
        one, other = root[:, None], root[None]
        ratios = (one + other + 1) / ((one + other) * one * other * (one + 1) * (other + 1))
        upstream = 0.5 * (upstream + upstream.mT)
        return basis @ (ratios * (basis.mT @ upstream @ basis)) @ basis.mT


@dataclass(frozen=True, eq=False)
class FullCurvature(Curvature):
    """Dense."""

    kind: ClassVar[str] = "full"
    matrix: Tensor
    """[d, d]"""
    hessian: bool = False

    @property
    def dim(self) -> int:
        return len(self.matrix)

    def scaled(self, factor: float) -> FullCurvature:
        return replace(self, matrix=factor * self.matrix)

    def dense(self) -> Tensor:
        return self.matrix

    @property
    def diagonal(self) -> Tensor:
        return self.matrix.diagonal()

    def plus(self, prior: Covariance) -> tuple[Curvature, Tensor]:
        """Exact for every prior."""
        eye = torch.eye(prior.dim, dtype=self.matrix.dtype, device=self.matrix.device)
        both = replace(self, matrix=self.matrix + prior.precision_product(eye))
        return both, self.matrix.new_zeros(prior.dim)

    def _posterior(self, precision: Tensor) -> Tensor:
        return self.matrix + torch.diag(precision.expand(self.dim))

    def log_det(self, precision: Tensor) -> Tensor:
        factor, info = torch.linalg.cholesky_ex(self._posterior(precision))
        return torch.where(info == 0, 2 * factor.diagonal().log().sum(), torch.nan)

    def covariance(self, precision: Tensor, *, temperature: float = 1.0) -> Full:
        precisions = self._posterior(precision)
        factor, info = torch.linalg.cholesky_ex(precisions)
        if int(info) or not bool(factor.isfinite().all()):
            finite = bool(precisions.isfinite().all())
            ends = torch.linalg.eigvalsh(precisions)[[0, -1]].tolist() if finite else [math.nan] * 2
            detail = "its lowest eigenvalue is {:.3g}, its largest {:.3g}".format(*ends)
            raise NotPositiveDefinite(_not_positive(detail, hessian=self.hessian))
        return Full(factor / temperature**0.5)


def _merged(one: KroneckerFactors, other: KroneckerFactors) -> KroneckerFactors:
    """The sum of two, as one: the diagonal of the sum in the eigenbases of its partial traces over rows and columns.

    Exact where both have one basis; else the trace is kept, and no other matrix in this basis is closer (Frobenius).
    """
    left = _basis_of_sum([(part.left, part.eigenvalues.sum(1)) for part in (one, other)])
    right = _basis_of_sum([(part.right, part.eigenvalues.sum(0)) for part in (one, other)])
    values = torch.zeros_like(one.eigenvalues)
    for part in (one, other):
        values = values + marginal(_turn(left, part.left), _turn(right, part.right), part.eigenvalues)
    return KroneckerFactors(left, right, values)


def _basis_of_sum(parts: Sequence[tuple[Tensor | None, Tensor]]) -> Tensor | None:
    """Eigenvectors of sum B diag(values) B'; None if all B are the identity."""
    if all(basis is None for basis, _ in parts):
        return None
    total = sum(torch.diag(values) if basis is None else (basis * values) @ basis.mT for basis, values in parts)
    assert isinstance(total, Tensor)
    return torch.linalg.eigh(total).eigenvectors


def _turn(new: Tensor | None, old: Tensor | None) -> Tensor | None:
    """new' old: from the coordinates of one basis to those of another."""
    if new is None:
        return old
    return new.mT if old is None else new.mT @ old


def _positive(values: Tensor, *, hessian: bool = False) -> Tensor:
    bad = ~((values > 0) & values.isfinite())
    if bool(bad.any()):
        lowest = float(values.nan_to_num(nan=-float("inf")).min())
        detail = f"{int(bad.sum())} of {values.numel()} eigenvalues are not, lowest {lowest:.3g}"
        raise NotPositiveDefinite(_not_positive(detail, hessian=hessian))
    return values


def _not_positive(detail: str, *, hessian: bool) -> str:
    return (
        f"the posterior's precision H + tau is not positive definite ({detail}): there is no Gaussian here. "
        + not_positive(hessian=hessian)
    )


def not_positive(*, hessian: bool) -> str:
    """Why H + tau may have no positive eigenvalues, and what to do."""
    if hessian:
        return (
            "A Hessian is indefinite away from a minimum: train on, use estimator='ggn', whose curvature is never "
            "negative, or lower prior_std, the jitter of this model: 1 / prior_std^2 is added to every eigenvalue"
        )
    return (
        "This curvature is a sum of squares; the data leave directions open, and rounding its largest eigenvalue is "
        "more than the 1 / prior_std^2 that the prior adds there: lower prior_std, the jitter of this model, or give "
        "the model in float64"
    )
