"""The sum of a curvature and of another Gaussian's precision, and its tempering, against dense matrices."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hf_bayes.distributions.approximations import Gaussian
from hf_bayes.distributions.covariance import COVARIANCES, LowRank, dense
from hf_bayes.methods.laplace.prior_precision import GaussianPrecision, prior_moments, temper
from tests.distributions.covariance.structures import make
from tests.methods.laplace.curvatures import DIM, KINDS
from tests.methods.laplace.test_curvature import kinds


@kinds
@pytest.mark.parametrize("prior", COVARIANCES)
def test_the_precision_of_another_gaussian_adds_up(kind: str, prior: str) -> None:
    curvature, (before, old) = KINDS[kind](), make(prior, seed=3)
    if isinstance(before, LowRank):  # as a curvature makes them, narrower than their diagonal part
        before = replace(before, scale=before.scale.clamp(max=0.9))
        old = torch.linalg.inv(dense(before, old))
    found = torch.linalg.inv(
        dense(temper(curvature, GaussianPrecision(before), temperature=1.0, what="posterior"), old)
    )
    if (kind, prior) == ("kronecker", "kronecker"):
        expected = curvature.dense() + old  # both have the same eigenbases
    elif kind in (prior, "full"):
        expected = curvature.dense() + old
    else:
        expected = curvature.dense() + torch.diag(old.diagonal())
        if kind == "kronecker":  # within a block, of the diagonal what the eigenbasis can hold
            assert torch.allclose(found.trace(), expected.trace(), rtol=1e-9)
            return
    assert torch.allclose(found, expected, rtol=1e-8, atol=1e-8)  # float64, condition numbers below 1e5
    assert not torch.allclose(found, curvature.dense() + torch.eye(DIM).double(), rtol=0.1)  # twin: the prior forgotten


def test_tempering_the_likelihood_keeps_an_inherited_precision() -> None:
    curvature, (before, old) = KINDS["full"](), make("full", seed=3)
    for what, expected in (
        ("posterior", (curvature.dense() + old) / 0.3),
        ("likelihood", curvature.dense() / 0.3 + old),
    ):
        found = torch.linalg.inv(dense(temper(curvature, GaussianPrecision(before), temperature=0.3, what=what), old))
        assert torch.allclose(found, expected, rtol=1e-8, atol=1e-8)


def test_a_mixture_as_prior_is_refused_with_a_way_out() -> None:
    like, mixture = torch.zeros(DIM), Gaussian.diagonal(torch.zeros(3, DIM), torch.ones(3, DIM))
    with pytest.raises(ValueError, match=r"got a mixture of 3: give one Gaussian, such as its \.single\(\)"):
        prior_moments(mixture, like)
    mean, precision = prior_moments(mixture.single(), like)
    assert torch.equal(mean, like)
    assert torch.equal(precision.diagonal, torch.ones(DIM))
