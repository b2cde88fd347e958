from __future__ import annotations

import torch

from hf_bayes.distributions.covariance import dense
from hf_bayes.methods.laplace.prior_precision import GaussianPrecision, temper
from tests.distributions.covariance.structures import make
from tests.methods.laplace.curvatures import KINDS


def test_a_stretching_low_rank_prior_is_added_by_its_diagonal() -> None:
    before, old = make("low_rank", seed=3)
    assert float(before.scale.max()) > 1
    found = torch.linalg.inv(
        dense(temper(KINDS["low_rank"](), GaussianPrecision(before), temperature=1.0, what="posterior"), old)
    )
    expected = KINDS["low_rank"]().dense() + torch.diag(old.diagonal())
    assert torch.allclose(found, expected, rtol=1e-8, atol=1e-8)
