"""A curvature matrix that is known by its products with vectors: products, the matrix, and linear systems.

H v is computed in one pass over the data, so H is never formed unless ``matrix`` is called. ``solve`` uses the
conjugate gradients of scipy (Hestenes and Stiefel 1952), one product for each iteration.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator, cg
from torch import Tensor

from hf_bayes.core.layout import Layout
from hf_bayes.core.number_checks import is_count, is_finite_number

VECTORS_AT_ONCE = 64
"""The number of columns of the matrix that one pass over the data computes."""

MAX_MATRIX = 8192
"""The largest d of a dense [d, d]."""


@dataclass(frozen=True, eq=False)
class CurvatureOperator:
    """H [d, d], the curvature of -log p(D | theta) on all data, without the prior.

    Attributes:
        products: a function of vectors [k, d] that returns H v [k, d].
        layout: the names and shapes of the parameters, in the order of theta.
        like: [d] the point, whose dtype and device vectors have.
    """

    products: Callable[[Tensor], Tensor]
    layout: Layout
    like: Tensor

    @property
    def dim(self) -> int:
        """d, the number of parameters."""
        return len(self.like)

    def product(self, vectors: Tensor) -> Tensor:
        """Return H v, [..., d] -> [..., d]. All vectors share one pass over the data.

        Raises:
            ValueError: for vectors of another size.
        """
        if not isinstance(vectors, Tensor) or vectors.ndim == 0 or vectors.shape[-1] != self.dim:
            got = list(vectors.shape) if isinstance(vectors, Tensor) else type(vectors).__name__
            raise ValueError(
                f"vectors must be a tensor [..., {self.dim}], got {got}: layout.flatten makes one from names"
            )
        flat = vectors.detach().to(self.like).reshape(-1, self.dim)
        return self.products(flat).reshape(vectors.shape)

    def matrix(self) -> Tensor:
        """Return H as a matrix [d, d], in d / 64 passes over the data.

        Raises:
            ValueError: if d is above ``MAX_MATRIX``.
        """
        if self.dim > MAX_MATRIX:
            raise ValueError(
                f"the matrix would have {self.dim} x {self.dim} elements; the limit is {MAX_MATRIX}: use product or "
                "solve, which do not form it"
            )
        eye = torch.eye(self.dim, dtype=self.like.dtype, device=self.like.device)
        matrix = torch.cat([self.products(part) for part in eye.split(VECTORS_AT_ONCE)])
        return (matrix + matrix.mT) / 2

    def solve(
        self,
        vector: Tensor,
        damping: float | Tensor,
        *,
        tolerance: float | None = None,
        max_iterations: int | None = None,
        preconditioner: Tensor | None = None,
    ) -> Tensor:
        """Return (H + damping)^-1 v [d], by conjugate gradients.

        Args:
            vector: [d] v.
            damping: the precision of the prior, a number or [d]: 0 or more. H alone is singular as a rule.
            tolerance: the norm of the residual relative to the norm of v; None is 1e-10 in float64 and 1e-5 in float32.
            max_iterations: the largest number of products; None is 10 d.
            preconditioner: [d] an approximation of the diagonal of H + damping; with it, fewer iterations may do.
        Raises:
            ValueError: if it does not converge, with the residual that it reached.
        """
        shift = torch.as_tensor(damping).to(self.like).expand(self.dim)
        if not bool((shift >= 0).all() and shift.isfinite().all()):
            raise ValueError(f"damping must be finite and >= 0, got {damping!r:.100}: it is the precision of a prior")
        if max_iterations is not None and not is_count(max_iterations):
            raise ValueError(f"max_iterations must be an integer >= 1, got {max_iterations!r}")
        tolerance = (1e-10 if self.like.dtype == torch.float64 else 1e-5) if tolerance is None else tolerance
        if not is_finite_number(tolerance) or not 0 < tolerance < 1:
            raise ValueError(f"tolerance must be a number in (0, 1), got {tolerance!r}")
        right = _numpy(self._one(vector))
        inverse = None if preconditioner is None else _numpy(1 / self._one(preconditioner))
        operator = self.as_linear_operator(shift)
        conditioned = None if inverse is None else LinearOperator(operator.shape, matvec=lambda v: inverse * v)
        found, failed = cg(operator, right, rtol=tolerance, atol=0.0, maxiter=max_iterations, M=conditioned)
        if failed:
            residual = np.linalg.norm(operator @ found - right) / np.linalg.norm(right)
            raise ValueError(
                f"conjugate gradients reached a relative residual of {residual:.2g} in {failed} iterations, wanted "
                f"{tolerance:g}: raise damping or max_iterations, give a preconditioner, or give the model in float64"
            )
        return torch.as_tensor(found).to(self.like)

    def as_linear_operator(self, damping: float | Tensor = 0.0) -> Any:
        """Return H + damping as a ``scipy.sparse.linalg.LinearOperator``, for eigsh, minres and the like."""
        shift = torch.as_tensor(damping).to(self.like)

        def matvec(vector: np.ndarray) -> np.ndarray:
            point = torch.as_tensor(vector).to(self.like).reshape(1, -1)
            return _numpy((self.products(point) + shift * point)[0])

        return LinearOperator((self.dim, self.dim), matvec=matvec, dtype=np.float64)

    def _one(self, vector: Tensor) -> Tensor:
        if vector.shape != self.like.shape:
            raise ValueError(f"a vector must have the shape [{self.dim}], got {list(vector.shape)}")
        return vector.detach().to(self.like)


def _numpy(values: Tensor) -> np.ndarray:
    found: np.ndarray = values.double().cpu().numpy()
    return found
