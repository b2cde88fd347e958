"""Numbers in float64 for the rules of a single pass."""

from __future__ import annotations

import torch
from torch import Tensor

DOUBLE = torch.float64


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal numbers in float64."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


def covariance_matrix(size: int, seed: int = 0) -> Tensor:
    """A covariance matrix without zeros."""
    root = normal(size, size, seed=seed)
    return root @ root.mT / size + 0.1 * torch.eye(size, dtype=DOUBLE)
