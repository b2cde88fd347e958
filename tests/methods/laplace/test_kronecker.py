from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch

from hf_bayes.fit.laplace import fit_laplace
from hf_bayes.methods.laplace.kronecker import KroneckerSum
from hf_bayes.methods.laplace.kronecker_curvature import DiagonalFactor
from hf_bayes.methods.laplace.laplace import LaplaceConfig
from tests.methods.laplace import brute_force
from tests.objectives.curvature_problems import CELLS, TOLERANCE, cotangents, error, evaluated, problems, run

pytestmark = pytest.mark.models


@problems
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize(("estimator", "samples"), CELLS)
def test_kfac_is_its_dense_definition(
    family: str, part: str, task: str, estimator: str, samples: int | None, sharing: str
) -> None:
    made, rows = evaluated(family, part, task)
    expected = brute_force.kfac(made, rows, cotangents(made, rows, estimator, samples), sharing)
    found = run(made, estimator=estimator, num_samples=samples, structure="kronecker", sharing=sharing, gradient=False)
    assert error(found.curvature.dense(), expected) < TOLERANCE.get(family, 1e-7)


@problems
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize(("estimator", "samples"), CELLS)
def test_corrected_eigenvalues_are_moments_in_the_kfac_basis(
    family: str, part: str, task: str, estimator: str, samples: int | None, sharing: str
) -> None:
    made, rows = evaluated(family, part, task)
    own_cotangents, tolerance = cotangents(made, rows, estimator, samples), TOLERANCE.get(family, 1e-7)
    moments, options = brute_force.outer(rows, own_cotangents), {"estimator": estimator, "num_samples": samples}
    found, plain = (
        run(made, structure=structure, sharing=sharing, gradient=False, **options).curvature.blocks  # type: ignore[attr-defined]
        for structure in ("kronecker_corrected", "kronecker")
    )
    start, uncorrected = 0, []
    for name, block, before in zip(made.layout.names, found, plain, strict=True):
        size = block.dim
        own = moments[start : start + size, start : start + size]
        start += size
        if own.abs().max() < 1e-20:  # the bias of BERT's keys does nothing
            continue
        if isinstance(block, DiagonalFactor):
            assert error(block.values, own.diagonal()) < tolerance
            continue
        assert torch.equal(block.left, before.left)
        assert torch.equal(block.right, before.right)
        basis = torch.kron(block.left.contiguous(), block.right.contiguous())
        wanted = (basis.T @ own @ basis).diagonal().view_as(block.eigenvalues)
        factors = brute_force.factors(made, name, rows, own_cotangents, sharing)
        for axis, (factor, size, vectors) in enumerate(zip(*factors, (block.left, block.right), strict=True)):
            # below the rounding of what was summed, of float32 within some modules: 0
            null = (vectors.T @ factor @ vectors).diagonal() < (1e-12 if family == "llama" else 1e-14) * size
            if null.any():  # one eigenspace, whose vectors share the mean
                wanted = wanted.movedim(axis, 0).clone()
                wanted[null] = wanted[null].mean(0)
                wanted = wanted.movedim(0, axis)
        assert error(block.eigenvalues, wanted) < tolerance
        uncorrected.append(error(before.eigenvalues, wanted))
    if part != "head":  # there K-FAC may be the curvature itself: of regression it is
        assert max(uncorrected) > 0.01  # the broken twin


def test_a_long_side_gets_a_diagonal_factor() -> None:
    made, rows = evaluated("gpt2", "head", "lm")
    own = cotangents(made, rows, "ggn", 2)
    g = torch.cat([row.vjp(c)["lm_head.weight"] for row, cs in zip(rows, own, strict=True) for c in cs])
    x = torch.cat([row.inputs["lm_head.weight"] for row in rows])
    found = run(made, structure="kronecker", num_samples=2, max_factor=4)
    assert found.curvature.blocks[0].left is None  # type: ignore[attr-defined]
    expected = torch.kron(torch.diag(g.square().sum(0)), x.T @ x / len(x))
    assert error(found.curvature.dense(), expected) < 1e-7
    assert "longer than max_factor=4" in found.fallbacks["lm_head.weight"]


def test_query_key_and_value_share_one_input_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    made, _ = evaluated("llama", "lora", "lm")
    sources: dict[str, int] = {}
    add = KroneckerSum.add

    def spy(self: KroneckerSum, record: Any) -> None:
        sources[record.layer.path.split("self_attn.")[1]] = record.source
        add(self, record)

    monkeypatch.setattr(KroneckerSum, "add", spy)
    run(made, structure="kronecker", gradient=False)
    inputs = {sources[f"{name}_proj.lora_A.default"] for name in "qkv"}
    assert len(inputs) == 1
    assert len(set(sources.values())) == 4  # and the input of each B


BIASED = [
    ("bert", "head", "classes"),
    ("bert", "block", "classes"),
    ("gpt2", "block", "lm"),
    ("bert", "head", "tokens"),
]


@pytest.mark.parametrize(("family", "part", "task"), BIASED)
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_a_bias_may_have_the_left_factor_of_its_module(family: str, part: str, task: str, sharing: str) -> None:
    made, rows = evaluated(family, part, task)
    own = cotangents(made, rows, "ggn", None)
    options = {"sharing": sharing, "bias": "factor", "gradient": False}
    found = run(made, estimator="ggn", num_samples=None, structure="kronecker", **options)
    seen = 0
    for name, block in zip(made.layout.names, found.curvature.blocks, strict=True):  # type: ignore[attr-defined]
        weight = name.replace(".bias", ".weight")
        if not name.endswith(".bias") or weight not in rows[0].inputs:
            continue
        pair = brute_force.factors(made, weight, rows, own, sharing)[0]
        expected = pair[1] if family == "gpt2" else pair[0]  # Conv1D stores the transposed matrix
        assert error(block.dense(), expected) < TOLERANCE.get(family, 1e-7) or expected.abs().max() < 1e-20
        assert name not in found.fallbacks
        seen += 1
    assert seen


@pytest.mark.parametrize(("family", "part", "task"), [("bert", "head", "classes"), ("bert", "block", "classes")])
def test_corrected_factors_of_a_bias_keep_its_trace(family: str, part: str, task: str) -> None:
    made, rows = evaluated(family, part, task)
    moments = brute_force.outer(rows, cotangents(made, rows, "ggn", None)).diagonal()
    options = {"bias": "factor", "gradient": False, "estimator": "ggn", "num_samples": None}
    found = run(made, structure="kronecker_corrected", **options).curvature
    assert error(found.diagonal.sum(), moments.sum()) < TOLERANCE.get(family, 1e-7)


def test_the_evidence_is_that_of_laplace_torch() -> None:
    """Compute laplace-torch's formula for the last layer of a classifier by hand.

    Its K-FAC has the blocks G (x) A of the weight and G of the bias, with G = sum_n (diag p - p p') and A = sum_n phi
    phi' / N. Its log marginal likelihood is log p(D | theta) - (log det (H + tau) - log det tau + tau theta'theta) / 2
    (laplace-torch 0.3: ``curvature/curvlinops.py``, ``ParametricLaplace.log_marginal_likelihood``). Its own number is
    that of ``Laplace(linear, "classification", subset_of_weights="all", hessian_structure="kron", prior_precision=2.5,
    backend=CurvlinopsGGN)`` in float64, fitted to the inputs and labels of this layer.
    """
    laplace_torch = -5.7095478559830095
    made, rows = evaluated("bert", "head", "classes")
    tau, theta = 2.5, brute_force_theta(made)
    probs = torch.cat([row.logits for row in rows]).softmax(1)
    features = torch.cat([row.inputs["classifier.weight"] for row in rows])
    left = torch.diag(probs.sum(0)) - probs.mT @ probs
    right = features.mT @ features / len(features)
    precisions = [torch.kron(left, right), left]
    log_det = sum(torch.linalg.slogdet(block / tau + torch.eye(len(block))).logabsdet for block in precisions)
    labels = torch.cat([row.labels.flatten() for row in rows])
    log_lik = probs.log().gather(1, labels[:, None]).sum()
    expected = float(log_lik - 0.5 * (log_det + tau * theta.square().sum()))
    assert expected == pytest.approx(laplace_torch, abs=1e-6)

    method = LaplaceConfig(structure="kronecker", bias="factor", num_samples=None, prior_std=tau**-0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the weights are no MAP
        posterior = fit_laplace(made.model, made.rows, method, collate=brute_force.pad, subspace="last_layer")
        diagonal = fit_laplace(made.model, made.rows, replace(method, bias="diagonal"), collate=brute_force.pad,
                               subspace="last_layer")  # fmt: skip
    assert posterior.config.diagnostics["laplace"][0]["log_evidence"] == pytest.approx(expected, abs=1e-6)
    assert abs(diagonal.config.diagnostics["laplace"][0]["log_evidence"] - expected) > 1e-3  # a diagonal is another one


def brute_force_theta(made: brute_force.Problem) -> torch.Tensor:
    parameters = dict(made.model.named_parameters())
    return torch.cat([parameters[name].detach().flatten() for name in made.layout.names])


def test_a_bias_factor_needs_a_kronecker_structure() -> None:
    with pytest.raises(ValueError, match="bias='factor' is a Kronecker factor, which structure='diagonal' does not"):
        LaplaceConfig(bias="factor", structure="diagonal")
    with pytest.raises(ValueError, match="bias='factor' is a Kronecker factor, which structure='diagonal' does not"):
        LaplaceConfig(bias="factor", estimator="hessian")
    with pytest.raises(ValueError, match="bias must be one of diagonal, factor, got 'dense'"):
        LaplaceConfig(bias="dense", structure="kronecker")
