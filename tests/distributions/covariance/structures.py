"""A covariance of each structure, with its dense precision from the definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_bayes.core.layout import Layout
from hf_bayes.core.rng import generator
from hf_bayes.distributions.covariance import (
    COVARIANCES,
    Covariance,
    Diagonal,
    DiagonalBlock,
    Full,
    Kronecker,
    KroneckerBlock,
    LowRank,
)

LAYOUT = Layout(("a", "b", "c"), ((2, 3), (4,), (3, 2)))


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=generator(seed, *shape), dtype=torch.float64)


def basis(size: int, rank: int | None = None) -> Tensor:
    return torch.linalg.qr(numbers(size, rank or size))[0].contiguous()


def make(kind: str, seed: int = 0) -> tuple[Covariance, Tensor]:
    """Return a covariance, and its dense precision computed from the definition."""
    spread = numbers(LAYOUT.dim, seed=seed).exp()
    if kind == "diagonal":
        return Diagonal(spread), torch.diag(spread**-2)
    if kind == "kronecker":
        first, last = numbers(2, 3, seed=seed).exp(), numbers(3, 2, seed=seed).exp()
        one, other = KroneckerBlock(basis(2), basis(3), first), KroneckerBlock(None, basis(2), last)
        rotations = [torch.kron(basis(2), basis(3)), torch.eye(4).double(), torch.kron(torch.eye(3).double(), basis(2))]
        values = [first.flatten(), spread[:4] ** 2, last.flatten()]
        parts = [r @ torch.diag(1 / v) @ r.T for r, v in zip(rotations, values, strict=True)]
        return Kronecker((one, DiagonalBlock(spread[:4]), other)), torch.block_diag(*parts)
    if kind == "low_rank":
        q, scale = basis(LAYOUT.dim, 3), torch.tensor([5.0, 0.2, 1.0], dtype=torch.float64)
        inner = torch.eye(LAYOUT.dim).double() + q @ torch.diag(1 / scale - 1) @ q.T
        return LowRank(spread, q, scale), inner / spread[:, None] / spread
    factor = 0.2 * numbers(LAYOUT.dim, LAYOUT.dim, seed=seed).tril(-1) + torch.diag(spread)
    return Full(factor), factor @ factor.T


kinds = pytest.mark.parametrize("kind", COVARIANCES)
