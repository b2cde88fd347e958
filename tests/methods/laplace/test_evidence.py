"""The evidence of a fitted classifier, and the prior that maximises it, against dense matrices."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_bayes import LaplaceConfig, fit_laplace
from hf_bayes.core.layout import Layout
from hf_bayes.distributions.covariance import KroneckerBlock, dense
from hf_bayes.methods.laplace import evidence, laplace
from hf_bayes.methods.laplace.curvature import DiagonalCurvature, FullCurvature
from hf_bayes.methods.laplace.evidence import BOUNDS, Expansion, groups, maximise
from hf_bayes.methods.laplace.low_rank_curvature import LowRankCurvature
from tests.methods.laplace import brute_force
from tests.objectives.curvature_problems import cotangents, evaluated

pytestmark = pytest.mark.models


def projected(tau: Tensor, blocks: tuple[Any, ...]) -> Tensor:
    """Return tau as [d, d]: its diagonal in the eigenbasis of each matrix, and tau itself for other tensors."""
    parts, start = [], 0
    for block in blocks:
        size = block.dim
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
def test_kfac_evidence_of_a_classifier_matches_dense_matrices(
    family: str, part: str, scope: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, rows = evaluated(family, part, "classes")
    chosen: list[Tensor] = []
    maximise = laplace.maximise
    monkeypatch.setattr(laplace, "maximise", lambda *args: chosen.append(maximise(*args)) or chosen[-1])
    config = LaplaceConfig(structure="kronecker", num_samples=None, fit_prior="evidence", prior_scope=scope)
    posterior = fit_laplace(
        made.model, made.rows, config, subspace=made.subspace, collate=brute_force.pad, batch_size=2
    )
    (note,), (tau,) = posterior.config.diagnostics["laplace"], chosen
    covariance, own = posterior.approximation.covariances[0], cotangents(made, rows, "ggn", None)
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
    (slope,) = torch.autograd.grad(expected, log_tau)
    sizes = [math.prod(shape) for shape in made.layout.shapes]
    if scope == "element":
        sizes = [1] * len(theta)
    slopes = torch.stack([part.sum() for part in slope.split(sizes)])
    values = torch.stack([part[0] for part in tau.split(sizes)])
    inside = (values < 0.99 * BOUNDS[1]) & (values > 1.01 * BOUNDS[0])
    # it ends where steps promise less than 1e-7 nats: squares of slopes over second derivatives, which are <= |g| / 2
    assert bool((slopes.square() < 1e-7 * torch.tensor(sizes))[inside].all())
    best = highest(lambda log_tau: evidence(curvature, log_tau.repeat_interleave(torch.tensor(sizes))), values.log())
    assert best - expected.item() < 1e-6
    assert bool(inside.any())
    if scope == "tensor":
        assert note["prior_precision"] == pytest.approx(values.tolist())


def highest(value: Callable[[Tensor], Tensor], start: Tensor) -> float:
    """Return the maximum within the bounds by torch's L-BFGS, from a point 1 away in every direction."""
    low, high = (math.log(bound) for bound in BOUNDS)
    where = (start - start.sign()).detach().requires_grad_()
    optimizer = torch.optim.LBFGS([where], max_iter=2000, tolerance_grad=1e-9, tolerance_change=0.0,
                                  history_size=50, line_search_fn="strong_wolfe")  # fmt: skip

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = -value(where.clamp(low, high))
        loss.backward()
        return loss

    optimizer.step(closure)
    return -float(closure().detach())


def planted(num_rows: int = 30, dim: int = 12) -> tuple[Tensor, Tensor]:
    """Return rows with correlated columns of very different sizes, and weights, two of which are at the mean."""
    rng = torch.Generator().manual_seed(0)
    rows = torch.randn(num_rows, dim, generator=rng, dtype=torch.float64) * torch.logspace(-2, 1, dim).double()
    theta = 0.3 * torch.randn(dim, generator=rng, dtype=torch.float64)
    rows += 0.5 * rows.roll(1, 1)
    theta[:2] = 0
    return rows, theta


def by_bisection(h: float, square: float) -> float:
    """Return the log tau within the bounds where the slope 1 - tau m^2 - tau / (h + tau) of the evidence is 0."""
    low, high = math.log(BOUNDS[0]), math.log(BOUNDS[1])
    for _ in range(100):
        middle = 0.5 * (low + high)
        tau = math.exp(middle)
        low, high = (middle, high) if h / (h + tau) > tau * square else (low, middle)
    return middle


def test_elementwise_evidence_is_maximal_in_closed_form(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, theta = planted()
    curvature = DiagonalCurvature(rows.square().sum(0))
    layout = Layout(("a", "b"), ((5,), (7,)))
    monkeypatch.setattr(evidence, "MAX_STEP", 100.0)
    monkeypatch.setattr(evidence, "MAX_ROUNDS", 1)  # nothing is left for a second
    tau = maximise(Expansion(curvature, -7.0, theta), torch.ones(12).double(), "element", layout)
    expected = [by_bisection(h, m**2) for h, m in zip(curvature.values.tolist(), theta.tolist(), strict=True)]
    assert tau.log().tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("make", [lambda rows: FullCurvature(rows.T @ rows), lambda rows: LowRankCurvature(rows.T)])
@pytest.mark.parametrize("scope", ["model", "tensor", "element"])
@pytest.mark.parametrize("start", [1e-4, 1.0, 1e4])
def test_evidence_ends_in_the_maximum_from_everywhere(make: Any, scope: str, start: float) -> None:
    rows, theta = planted()
    layout = Layout(("a", "b"), ((5,), (7,)))
    index = groups(scope, layout)

    def value(log_tau: Tensor) -> Tensor:
        """Return the evidence from dense matrices."""
        tau = log_tau.exp()[index]
        return 0.5 * (tau.log().sum() - (tau * theta.square()).sum() - torch.logdet(rows.T @ rows + torch.diag(tau)))

    found = maximise(Expansion(make(rows), 0.0, theta), torch.full((12,), start).double(), scope, layout)
    log_tau = torch.stack([found.log()[index == g][0] for g in range(int(index.max()) + 1)])
    best = highest(value, log_tau)
    assert best - float(value(log_tau)) < 1e-6
    assert best - float(value(torch.zeros_like(log_tau))) > 0.1  # the twin: without a search


def test_a_search_that_has_not_converged_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, theta = planted()
    layout = Layout(("a", "b"), ((5,), (7,)))
    monkeypatch.setattr(evidence, "MAX_ROUNDS", 1)
    monkeypatch.setattr(evidence, "MAX_RESTARTS", 1)
    with pytest.warns(UserWarning, match=r"evidence is not at its maximum: .*'element', 12 of them\) may gain"):
        maximise(Expansion(FullCurvature(rows.T @ rows), 0.0, theta), torch.ones(12).double(), "element", layout)
