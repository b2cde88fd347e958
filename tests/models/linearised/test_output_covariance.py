from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_bayes.core.layout import Layout
from hf_bayes.distributions.covariance import COVARIANCES, dense
from hf_bayes.models.linearised import output_covariance
from hf_bayes.models.linearised.output_covariance import head_covariance
from tests.models.linear_cases import random_covariance


@pytest.mark.parametrize("kind", COVARIANCES)
def test_the_output_covariance_of_a_head_needs_no_full_jacobian(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind != "full":  # whose Jacobian is smaller than itself

        def never(*args: Any) -> None:
            raise AssertionError("a Jacobian of all outputs and parameters")

        monkeypatch.setattr(output_covariance, "covariance_of_outputs", never)
    layout = Layout(("w", "b"), ((5, 3), (5,)))
    covariance = random_covariance(kind, layout)
    features = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    eye = torch.eye(5, dtype=torch.float64)
    jacobian = torch.cat([torch.einsum("uv,bn->buvn", eye, features).flatten(2), eye.expand(4, -1, -1)], -1)
    found = head_covariance(covariance, layout, features, weight="w")
    found = found if found.ndim == 3 else torch.diag_embed(found)
    expected = jacobian @ dense(covariance, features) @ jacobian.mT
    assert (found - expected).abs().max() < 1e-10 * expected.abs().max()
