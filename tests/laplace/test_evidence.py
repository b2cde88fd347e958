"""The evidence of a fitted classifier, and the prior that maximises it, against dense matrices."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_bayes import LaplaceConfig, fit_laplace
from hf_bayes.covariance import KroneckerBlock, dense
from hf_bayes.laplace import laplace
from hf_bayes.laplace.evidence import BOUNDS
from tests.laplace import brute_force
from tests.laplace.test_survey import looked, pulls


def projected(tau: Tensor, blocks: tuple[Any, ...]) -> Tensor:
    """[d, d]: of each matrix the diagonal of tau in its eigenbasis, turned back; of other tensors tau."""
    parts, start = [], 0
    for block in blocks:
        size = block.variances.numel() if isinstance(block, KroneckerBlock) else len(block)
        own = torch.diag(tau[start : start + size])
        start += size
        if isinstance(block, KroneckerBlock):
            basis = torch.kron(block.left.contiguous(), block.right.contiguous())
            own = basis @ torch.diag((basis.T @ own @ basis).diagonal()) @ basis.T
        parts.append(own)
    return torch.block_diag(*parts)


@pytest.mark.filterwarnings("ignore:the weights are no MAP")
@pytest.mark.parametrize("scope", ["tensor", "element"])
@pytest.mark.parametrize(("family", "part"), [("bert", "lora"), ("bert", "head"), ("bert", "block"), ("gpt2", "head")])
def test_evidence_of_a_classifier_by_kfac_is_that_of_dense_matrices(
    family: str, part: str, scope: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, rows = looked(family, part, "classes")
    chosen: list[Tensor] = []
    maximise = laplace.maximise
    monkeypatch.setattr(laplace, "maximise", lambda *args: chosen.append(maximise(*args)) or chosen[-1])
    config = LaplaceConfig(structure="kronecker", num_samples=None, fit_prior="evidence", prior_scope=scope)
    posterior = fit_laplace(
        made.model, made.rows, config, subspace=made.subspace, collate=brute_force.pad, batch_size=2
    )
    (note,), (tau,) = posterior.config.diagnostics["laplace"], chosen
    covariance, own = posterior.approximation.covariances[0], pulls(made, rows, "ggn", None)
    theta = posterior.approximation.means[0]
    log_lik = brute_force.log_lik(made, rows)

    def evidence(curvature: Tensor, log_tau: Tensor) -> Tensor:
        spread = log_tau.exp()
        log_prior = 0.5 * (log_tau - spread * theta.square() - math.log(2 * math.pi)).sum()
        precision = curvature + projected(spread, covariance.blocks)
        return log_lik + log_prior + 0.5 * len(theta) * math.log(2 * math.pi) - 0.5 * torch.logdet(precision)

    curvature = brute_force.kfac(made, rows, own, "expand")
    log_tau = tau.log().requires_grad_()
    expected = evidence(curvature, log_tau)
    assert note["log_evidence"] == pytest.approx(expected.item(), abs=1e-6)
    assert abs((evidence(brute_force.outer(rows, own), log_tau) - expected).item()) > 1e-4  # the twin: not K-FAC's
    wanted = torch.linalg.inv(curvature + projected(tau, covariance.blocks))
    assert (dense(covariance, theta) - wanted).abs().max() < 1e-7 * wanted.abs().max()
    if scope == "tensor":  # of hundreds of elements 500 steps may end before the maximum, here 0.002 nats below it
        (slope,) = torch.autograd.grad(expected, log_tau)
        sizes = [math.prod(shape) for shape in made.layout.shapes]
        slopes = torch.stack([part.sum() for part in slope.split(sizes)])
        values = torch.stack([part[0] for part in tau.split(sizes)])
        inside = values < 0.99 * BOUNDS[1]
        # steps in log tau end at 1e-6; where tau |theta_g|^2 < |g|, second derivatives are below 5/8 |g|
        assert bool((slopes.abs() < 1e-6 * torch.tensor(sizes))[inside].all())
        assert bool(inside.any())
        assert note["prior_precision"] == pytest.approx(values.tolist())
