"""Products of a model's curvature with vectors, and gradients of single rows, computed without a [d, d] matrix.

Both use the pass and the estimators of ``curvature_pass``. The largest tensor has the gradients of the rows of a batch,
[B, d].
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from hf_bayes.core.layout import Layout
from hf_bayes.members.single_member import as_single_model
from hf_bayes.methods.laplace.accumulators import RowSum
from hf_bayes.methods.laplace.curvature import Curvature
from hf_bayes.methods.laplace.estimators import Estimator
from hf_bayes.models.base import BayesianModel
from hf_bayes.objectives.curvature_pass import TRUE, PassData, hooks_of, run_vjps


class ProductSum(RowSum):
    """The sum of g (g . v) over the row gradients g of all VJPs, for vectors v [k, d]."""

    def __init__(self, layout: Layout, like: Tensor, vectors: Tensor) -> None:
        super().__init__(layout, like)
        self.vectors, self.products = vectors, torch.zeros_like(vectors)

    def tensors(self) -> Iterable[Tensor]:
        return [self.products]

    def _take(self, rows: Tensor) -> None:
        self.products.addmm_((rows @ self.vectors.mT).mT, rows)

    def result(self) -> Curvature:
        raise AssertionError("products are no curvature")


class RowGradients(RowSum):
    """The gradients of all rows so far: ``batches`` has a tensor [B, d] for each batch."""

    def __init__(self, layout: Layout, like: Tensor) -> None:
        super().__init__(layout, like)
        self.batches: list[Tensor] = []

    def tensors(self) -> Iterable[Tensor]:
        return []

    def _take(self, rows: Tensor) -> None:
        self.batches.append(self._rooted(rows.clone(), slice(None)))

    def result(self) -> Curvature:
        raise AssertionError("row gradients are no curvature")


def curvature_products(
    model: BayesianModel, theta: Tensor, data: PassData, estimator: Estimator, vectors: Tensor
) -> Tensor:
    """Return H v for ``vectors`` [k, d], in one pass over the rows of ``data``."""
    with as_single_model(model.members, theta):
        total = ProductSum(model.layout, theta, vectors.to(theta))
        run_vjps(
            model, hooks_of(model), theta, data, [(estimator, [total])],
            range(data.num_rows),
        )  # fmt: skip
    return data.scale * total.products


def row_gradients(model: BayesianModel, theta: Tensor, data: PassData, rows: list[int]) -> Tensor:
    """Return the gradients [B, d] of the log-likelihoods of some rows, given by their numbers."""
    found = RowGradients(model.layout, theta)
    with as_single_model(model.members, theta):
        run_vjps(model, hooks_of(model), theta, data, [(TRUE, [found])], rows)
    return torch.cat(found.batches)
