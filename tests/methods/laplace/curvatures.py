"""A curvature of each structure over three tensors."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hf_bayes.core.layout import Layout
from hf_bayes.core.rng import generator
from hf_bayes.methods.laplace.curvature import Curvature, DiagonalCurvature, FullCurvature
from hf_bayes.methods.laplace.kronecker_curvature import DiagonalFactor, KroneckerCurvature, KroneckerFactors
from hf_bayes.methods.laplace.low_rank_curvature import LowRankCurvature

LAYOUT = Layout(("a", "b", "c"), ((2, 3), (4,), (3, 2)))

DIM = LAYOUT.dim


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator(0, *shape), dtype=torch.float64)


def basis(size: int) -> Tensor:
    return torch.linalg.qr(numbers(size, size))[0]


KINDS: dict[str, Callable[[], Curvature]] = {
    "diagonal": lambda: DiagonalCurvature(numbers(DIM).exp()),
    "kronecker": lambda: KroneckerCurvature((
        KroneckerFactors(basis(2), basis(3), numbers(2, 3).exp()),
        DiagonalFactor(numbers(4).exp()),
        KroneckerFactors(None, basis(2), numbers(3, 2).exp()),
    )),
    "low_rank": lambda: LowRankCurvature(numbers(DIM, 3)),
    "full": lambda: FullCurvature(numbers(DIM, DIM) @ numbers(DIM, DIM).T),
}  # fmt: skip
