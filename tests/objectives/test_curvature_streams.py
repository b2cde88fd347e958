from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from hf_bayes.methods.laplace.estimators import build_estimator
from hf_bayes.models.attaching import attach
from hf_bayes.objectives.curvature_pass import PassData
from hf_bayes.objectives.curvature_streams import curvature_products, row_gradients
from tests.methods.laplace import brute_force
from tests.objectives.curvature_problems import cotangents, error, evaluated

pytestmark = pytest.mark.models


def test_products_and_row_gradients_agree_with_brute_force() -> None:
    made, rows = evaluated("bert", "block", "classes")
    g = torch.stack([
        torch.einsum("tcd,tc->d", row.jacobian, own[0])
        for row, own in zip(rows, cotangents(made, rows, "ef_sequence", 1), strict=True)
    ])  # fmt: skip
    with attach(made.model, subspace=made.subspace) as model:
        theta = model.theta[0].detach()
        data = PassData(made.batches(2), len(made.rows), 3.0, 0, None, nullcontext)
        vectors = torch.randn(4, len(theta), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        found = curvature_products(model, theta, data, build_estimator("ef_sequence", None), vectors)
        assert error(found, 3 * vectors @ g.mT @ g) < 1e-10  # a scale of 3 nats per nat of a term
        assert error(row_gradients(model, theta, data, [2, 0]), g[[2, 0]]) < 1e-10
    assert brute_force.log_lik(made, rows) < 0
