"""The leading eigenvectors of a Hessian, found by Lanczos from its products with vectors.

    H ~ Q diag(values) Q' + rest (I - Q Q'),   rest = tr((I - Q Q') H) / (d - r)

Q [d, r] holds the eigenvectors of the r largest eigenvalues. All other directions get their mean curvature, so the
trace of H is kept. This is exact where they have one curvature: for a likelihood of rank r beside an isotropic prior.
The eigenvectors come from ARPACK (implicitly restarted Lanczos; ``scipy.sparse.linalg.eigsh``). ``rest`` comes from
random probes in the complement of Q (Hutchinson), each of which is exact where the curvature there is constant.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigsh
from torch import Tensor

from hf_bayes.core.rng import generator
from hf_bayes.distributions.covariance import LowRank
from hf_bayes.methods.laplace.curvature import Curvature, require_positive
from hf_bayes.methods.laplace.low_rank_curvature import LowRankCurvature

Product = Callable[[Tensor], Tensor]
"""v -> H v, [k, d] -> [k, d]."""

NUM_PROBES = 16
"""The number of random probes for ``rest``. Their mean has a relative standard error of about sqrt(2 / (16 d)) times
the spread of the remaining eigenvalues."""

LOWEST_TOLERANCE = 1e-3
"""The relative accuracy of the lowest eigenvalue, of which only the sign and the size are needed."""


@dataclass(frozen=True, eq=False)
class LowRankHessian(Curvature):
    """A Hessian of r leading directions, and one curvature for all others.

    Attributes:
        columns: [d, r] Q diag(values - rest)^1/2.
        rest: a scalar tensor, the mean curvature of the other directions. It may be negative.
        lowest: a scalar tensor, the lowest eigenvalue of H.
    """

    kind: ClassVar[str] = "low_rank"
    columns: Tensor
    rest: Tensor
    lowest: Tensor
    hessian: bool | str = True

    @property
    def dim(self) -> int:
        return len(self.columns)

    @property
    def _above_rest(self) -> LowRankCurvature:
        return LowRankCurvature(self.columns)

    def scaled(self, factor: float) -> LowRankHessian:
        return replace(self, columns=factor**0.5 * self.columns, rest=factor * self.rest, lowest=factor * self.lowest)

    def dense(self) -> Tensor:
        return self._above_rest.dense() + self.rest * torch.eye(self.dim).to(self.columns)

    @property
    def diagonal(self) -> Tensor:
        return self._above_rest.diagonal + self.rest

    def log_det(self, precision: Tensor) -> Tensor:
        return self._above_rest.log_det(self.rest + precision)

    def covariance(self, precision: Tensor, *, temperature: float = 1.0) -> LowRank:
        # no prior raises the lowest eigenvalue by more than its largest precision
        require_positive((self.lowest + precision.max())[None], hessian=self.hessian)
        require_positive(self.rest + precision, hessian=self.hessian)
        return self._above_rest.covariance(self.rest + precision, temperature=temperature)


def low_rank_hessian(product: Product, like: Tensor, rank: int, *, hessian: bool | str = True) -> LowRankHessian:
    """Return the ``rank`` leading directions of a Hessian, in the dtype and on the device of ``like`` [d].

    Raises:
        ValueError: if Lanczos does not converge.
    """
    dim = len(like)
    if dim <= 2 * rank + 20:  # Lanczos would take as many products
        matrix = product(torch.eye(dim, dtype=like.dtype, device=like.device))
        values, vectors = torch.linalg.eigh((matrix + matrix.mT) / 2)
        kept = slice(max(0, dim - rank), None)
        lowest, others = values[0], values[: kept.start]
        # without other directions any value up to the lowest serves, since all directions are kept exactly
        rest = others.mean() if len(others) else lowest
        values, vectors = values[kept], vectors[:, kept]
    else:
        values, vectors = _extreme(product, like, rank, "LA", tolerance=0.0)
        lowest = _extreme(product, like, 1, "SA", tolerance=LOWEST_TOLERANCE)[0][0]
        rest = _mean_curvature(product, vectors)
    columns = vectors * (values - rest).clamp_min(0).sqrt()  # rounding, where kept values equal the rest
    return LowRankHessian(columns, rest, lowest, hessian=hessian)


def _extreme(product: Product, like: Tensor, count: int, which: str, *, tolerance: float) -> tuple[Tensor, Tensor]:
    """Return the largest ("LA") or the smallest ("SA") eigenvalues [count], and their eigenvectors [d, count]."""

    def matvec(vector: np.ndarray) -> np.ndarray:
        found: np.ndarray = product(torch.as_tensor(vector).reshape(1, -1).to(like))[0].double().cpu().numpy()
        return found

    operator = LinearOperator((len(like), len(like)), matvec=matvec, dtype=np.float64)
    start = torch.randn(len(like), generator=generator("lanczos", len(like)), dtype=torch.float64).numpy()
    tolerance = max(tolerance, 0.0 if like.dtype == torch.float64 else 10 * torch.finfo(like.dtype).eps)
    try:
        values, vectors = eigsh(operator, k=count, which=which, v0=start, tol=tolerance)
    except ArpackNoConvergence as error:
        raise ValueError(
            f"Lanczos found {len(error.eigenvalues)} of {count} eigenvalues of the Hessian: lower rank (got {count}), "
            "or give theta in float64"
        ) from error
    return torch.as_tensor(values).to(like), torch.as_tensor(vectors).to(like)


def _mean_curvature(product: Product, basis: Tensor) -> Tensor:
    """Return the mean curvature of the directions orthogonal to ``basis`` [d, r]."""
    rng = generator("probes", len(basis))
    probes = torch.randn(NUM_PROBES, len(basis), generator=rng, dtype=torch.float64).to(basis)
    probes = probes - (probes @ basis) @ basis.mT
    probes = probes - (probes @ basis) @ basis.mT  # again, for what rounding left
    return (probes * product(probes)).sum() / probes.square().sum()
