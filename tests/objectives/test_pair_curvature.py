"""Curvature of preferences: a pair is one term, and its gradient is the difference of those of its texts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_bayes.core.layout import initial
from hf_bayes.methods.laplace.kronecker_curvature import DiagonalFactor
from tests.methods.laplace import brute_force
from tests.objectives.curvature_problems import TOLERANCE, error
from tests.objectives.pair_problems import (
    PairProblem,
    Row,
    cotangents,
    evaluate_pairs,
    kfac,
    log_lik,
    outputs_of,
    pair_problem,
    run,
)

PROBLEMS = [
    ("llama", "head", "rewards"),  # every token is scored, the last one read
    ("llama", "lora", "rewards"),
    ("gpt2", "lora", "rewards"),
    ("gpt2", "embeddings", "rewards"),
    ("bert", "block", "rewards"),
    ("llama", "head", "dpo"),
    ("llama", "lora", "dpo"),
    ("gpt2", "head", "dpo"),
    ("gpt2", "block", "dpo"),
    ("gpt2", "embeddings", "dpo"),
]
CELLS = [("ggn", None), ("ggn", 2), ("ef_sequence", 1)]  # a pair is one term, so that ef_token is the same
problems = pytest.mark.parametrize(("family", "part", "kind"), PROBLEMS, ids=["-".join(p) for p in PROBLEMS])

_CACHE: dict[tuple[str, str, str], tuple[PairProblem, list[Row]]] = {}


def evaluated(family: str, part: str, kind: str) -> tuple[PairProblem, list[Row]]:
    key = (family, part, kind)
    if key not in _CACHE:
        made = pair_problem(*key)
        _CACHE[key] = (made, evaluate_pairs(made))
    return _CACHE[key]


@problems
@pytest.mark.parametrize(("estimator", "samples"), CELLS)
def test_squares_of_differences_add_up_over_pairs(
    family: str, part: str, kind: str, estimator: str, samples: int | None
) -> None:
    made, rows = evaluated(family, part, kind)
    expected = brute_force.outer(rows, cotangents(made, rows, estimator, samples))
    tolerance = TOLERANCE.get(family, 1e-10)  # float64 sums in another order
    options = {"estimator": estimator, "num_samples": samples}
    for structure in ("full", "low_rank"):
        found = run(made, structure=structure, rank=8, **options)
        assert error(found.curvature.dense(), expected) < tolerance
    diagonal = run(made, structure="diagonal", batch=3, **options)
    assert error(diagonal.curvature.diagonal, expected.diagonal()) < tolerance
    assert diagonal.log_lik == pytest.approx(log_lik(rows), rel=1e-6 if family == "llama" else 1e-10)
    assert (diagonal.num_rows, diagonal.num_terms) == (4, 4)
    # the broken twin: texts that are squared one by one, as if they were rows
    alone = [
        c[:, [place]] @ row.jacobian[:, place]
        for row, cs in zip(rows, cotangents(made, rows, estimator, samples), strict=True)
        for c in cs
        for place in (0, 1)
    ]
    assert error(found.curvature.diagonal, torch.cat(alone).square().sum(0)) > 0.01


@problems
def test_the_gradient_is_that_of_the_pairs(family: str, part: str, kind: str) -> None:
    made, rows = evaluated(family, part, kind)
    own = cotangents(made, rows, "ef_sequence", 1)
    expected = sum(torch.einsum("tcd,tc->d", row.jacobian, cs[0]) for row, cs in zip(rows, own, strict=True))
    found = run(made).gradient
    assert found is not None
    assert isinstance(expected, Tensor)
    assert error(found.mean, expected) < TOLERANCE.get(family, 1e-10)


@problems
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_kronecker_factors_are_of_the_texts(family: str, part: str, kind: str, sharing: str) -> None:
    made, rows = evaluated(family, part, kind)
    expected = kfac(made, rows, cotangents(made, rows, "ggn", None), sharing)
    for batch in (4, 1):
        found = run(made, structure="kronecker", sharing=sharing, num_samples=None, batch=batch)
        assert error(found.curvature.dense(), expected) < TOLERANCE.get(family, 1e-10)


@problems
def test_corrected_eigenvalues_are_moments_of_pairs(family: str, part: str, kind: str) -> None:
    made, rows = evaluated(family, part, kind)
    moments = brute_force.outer(rows, cotangents(made, rows, "ggn", None))
    found = run(made, structure="kronecker_corrected", num_samples=None).curvature
    # the trace is that of the curvature in every basis
    assert float(found.diagonal.sum()) == pytest.approx(float(moments.diagonal().sum()), rel=1e-5)
    start = 0
    for block in found.blocks:  # type: ignore[attr-defined]
        own = moments[start : start + block.dim, start : start + block.dim]
        if isinstance(block, DiagonalFactor):
            assert torch.allclose(block.values, own.diagonal(), rtol=1e-5, atol=1e-10)
        start += block.dim


@pytest.mark.parametrize(
    ("family", "part", "kind"),
    [("llama", "head", "rewards"), ("gpt2", "lora", "rewards"), ("gpt2", "head", "dpo")],
)
def test_the_hessian_of_pairs_is_that_of_autograd(family: str, part: str, kind: str) -> None:
    made, _ = evaluated(family, part, kind)

    def minus_log_lik(theta: Tensor) -> Tensor:
        numbers = range(len(made.texts))
        return -torch.stack([outputs_of(made, theta, n).log_softmax(-1)[made.labels[n]] for n in numbers]).sum()

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        expected = torch.autograd.functional.hessian(minus_log_lik, initial(made.model, made.layout))
    found = run(made, estimator="hessian", structure="full").curvature.dense()
    assert error(found, expected) < TOLERANCE.get(family, 1e-7)
