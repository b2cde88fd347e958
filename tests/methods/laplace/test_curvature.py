"""Posterior covariances, evidence and prior precision against dense matrices."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hf_bayes.core.layout import Layout
from hf_bayes.distributions.covariance import dense
from hf_bayes.methods.laplace.curvature import (
    Curvature,
    DiagonalCurvature,
    FullCurvature,
)
from hf_bayes.methods.laplace.evidence import Expansion, maximise
from hf_bayes.methods.laplace.prior_precision import ElementwisePrecision, temper
from tests.methods.laplace.curvatures import DIM, KINDS, LAYOUT, numbers

PRECISIONS = {
    "model": lambda: torch.tensor(0.7, dtype=torch.float64),
    "tensor": lambda: torch.tensor([0.7] * 6 + [2.0] * 4 + [0.1] * 6, dtype=torch.float64),
}
kinds = pytest.mark.parametrize("kind", KINDS)
precisions = pytest.mark.parametrize("precision", [make() for make in PRECISIONS.values()], ids=list(PRECISIONS))


def matrix(curvature: Curvature, precision: Tensor) -> Tensor:
    return curvature.dense() + torch.diag(precision.expand(DIM))


@kinds
@precisions
@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_covariances_are_tempered_as_documented(kind: str, precision: Tensor, temperature: float) -> None:
    curvature = KINDS[kind]()
    both = {"posterior": temperature * torch.linalg.inv(matrix(curvature, precision)),
            "likelihood": torch.linalg.inv(matrix(curvature.scaled(1 / temperature), precision))}  # fmt: skip
    for what, expected in both.items():
        covariance = temper(curvature, ElementwisePrecision(precision), temperature=temperature, what=what)
        found = dense(covariance, expected)
        assert torch.allclose(found, expected, rtol=1e-9, atol=1e-9)  # float64, condition numbers below 1e4
    if temperature != 1:
        assert not torch.allclose(*both.values(), rtol=0.1)  # the twin: one in place of the other


@kinds
def test_the_prior_is_counted_once_and_not_per_example(kind: str) -> None:
    curvature, tau = KINDS[kind](), torch.tensor(0.7, dtype=torch.float64)
    found = dense(curvature.covariance(tau), tau)
    assert torch.allclose(torch.linalg.inv(found) - curvature.dense(), torch.diag(tau.expand(DIM)), atol=1e-8)
    per_example = dense(curvature.covariance(10 * tau), tau)
    assert not torch.allclose(per_example, found, rtol=0.1)


@kinds
@precisions
def test_evidence_is_that_of_the_dense_formula(kind: str, precision: Tensor) -> None:
    curvature, offset = KINDS[kind](), numbers(DIM)
    found = Expansion(curvature, -12.5, offset).log_evidence(precision)
    prior = torch.distributions.Normal(0.0, precision.expand(DIM).rsqrt()).log_prob(offset).sum()
    two_pi = torch.tensor(2 * torch.pi, dtype=torch.float64)
    expected = -12.5 + prior + DIM / 2 * two_pi.log() - 0.5 * torch.logdet(matrix(curvature, precision))
    assert float(found) == pytest.approx(float(expected), abs=1e-6)


@kinds
@pytest.mark.parametrize("scope", ["model", "tensor"])
def test_the_best_precision_satisfies_mackays_equation(kind: str, scope: str) -> None:
    curvature, offset = KINDS[kind](), numbers(DIM)
    found = maximise(Expansion(curvature, 0.0, offset), torch.ones(DIM, dtype=torch.float64), scope, LAYOUT)
    variance = torch.linalg.inv(matrix(curvature, found)).diagonal()
    parts = [slice(0, DIM)] if scope == "model" else [slice(0, 6), slice(6, 10), slice(10, 16)]
    for part in parts:
        tau = found[part][0]
        assert torch.equal(found[part], tau.expand_as(found[part]))
        # steps end below 1e-6 in log tau
        well_determined = len(found[part]) - tau * variance[part].sum()
        assert float(tau * offset[part].square().sum()) == pytest.approx(float(well_determined), rel=1e-4)


def test_the_best_precision_of_an_element_is_in_closed_form() -> None:
    curvature, offset = KINDS["diagonal"](), numbers(DIM)
    found = maximise(Expansion(curvature, 0.0, offset), torch.ones(DIM, dtype=torch.float64), "element", LAYOUT)
    h, square = curvature.diagonal, offset.square()
    expected = (-square * h + (square**2 * h**2 + 4 * square * h).sqrt()) / (2 * square)  # 1/tau - d^2 - 1/(h+tau) = 0
    assert torch.allclose(found, expected, rtol=1e-4)


@pytest.mark.parametrize("kind", ["diagonal", "full"])
def test_an_indefinite_curvature_is_refused_in_words(kind: str) -> None:
    values = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)
    made = DiagonalCurvature(values) if kind == "diagonal" else FullCurvature(torch.diag(values))
    curvature = replace(made, hessian=True).scaled(1.0)
    with pytest.raises(ValueError, match=r"not positive definite .*lowest.* -1.*use estimator='ggn'"):
        curvature.covariance(torch.tensor(1.0, dtype=torch.float64))
    layout = Layout(("a",), ((3,),))
    with pytest.raises(ValueError, match=r"the evidence is not defined: H \+ tau is not positive definite.*'ggn'"):
        maximise(Expansion(curvature, 0.0, torch.ones(3).double()), torch.ones(3).double(), "model", layout)
    with pytest.raises(ValueError, match="not positive definite"):
        FullCurvature(torch.full((2, 2), torch.nan)).covariance(torch.tensor(1.0))
