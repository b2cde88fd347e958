"""Every cell of estimator x structure x subspace x likelihood against its definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hf_bayes.attaching import attach
from hf_bayes.laplace.cells import CurvatureSpec
from hf_bayes.rng import generator
from hf_bayes.survey import Survey, survey
from tests.laplace import brute_force
from tests.laplace.brute_force import Problem, Row, problem

PROBLEMS = [
    (family, part, task)
    for family, task in (("gpt2", "lm"), ("llama", "lm"), ("bert", "classes"), ("bert", "regression"))
    for part in ("lora", "head", "block")
]
problems = pytest.mark.parametrize(("family", "part", "task"), PROBLEMS, ids=["-".join(p) for p in PROBLEMS])
TOLERANCE = {"llama": 1e-5}
"""Relative to the largest entry. Llama-like models compute their norms in float32; the others are float64 throughout."""

_CACHE: dict[Any, tuple[Problem, list[Row]]] = {}


def looked(family: str, part: str, task: str) -> tuple[Problem, list[Row]]:
    key = (family, part, task)
    if key not in _CACHE:
        made = problem(*key)
        _CACHE[key] = (made, brute_force.look(made))
    return _CACHE[key]


def run(made: Problem, *, batch: int = 3, **changes: Any) -> Survey:
    options = {k: changes.pop(k) for k in ("scale", "gradient", "seed") if k in changes}
    noise = brute_force.NOISE if made.task == "regression" else None
    with attach(made.model, subspace=made.subspace, noise_std=noise) as model:
        return survey(model, model.theta[0].detach(), made.batches(batch), CurvatureSpec(**changes), **options)


def pulls(made: Problem, rows: list[Row], estimator: str, samples: int | None) -> list[list[Tensor]]:
    streams = brute_force.uniform_streams(made, rows, lambda s: generator(0, "labels", s), samples or 0)
    return brute_force.cotangents(made, rows, estimator, samples, streams)


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


CELLS = [("ggn", None), ("ggn", 2), ("ef_sequence", 1), ("ef_token", None), ("ef_token", 2)]


@problems
@pytest.mark.parametrize(("estimator", "samples"), CELLS)
def test_full_diagonal_and_low_rank_are_those_of_brute_force(
    family: str, part: str, task: str, estimator: str, samples: int | None
) -> None:
    made, rows = looked(family, part, task)
    expected = brute_force.outer(rows, pulls(made, rows, estimator, samples))
    tolerance = TOLERANCE.get(family, 1e-7)
    for structure in ("full", "diagonal", "low_rank"):
        found = run(made, estimator=estimator, num_samples=samples, structure=structure, rank=400)
        wanted = torch.diag(expected.diagonal()) if structure == "diagonal" else expected
        assert error(found.curvature.dense(), wanted) < tolerance, structure
    assert found.log_lik == pytest.approx(brute_force.log_lik(made, rows), rel=tolerance)
    assert (found.num_rows, found.num_terms) == (len(rows), sum(len(row.labels) for row in rows))
    slope = sum(
        torch.einsum("tcd,tc->d", row.jacobian, brute_force.score(made, row.logits, row.labels)) for row in rows
    )
    assert found.gradient is not None
    assert error(found.gradient, torch.as_tensor(slope)) < tolerance


@problems
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize(("estimator", "samples"), CELLS)
def test_kfac_is_its_dense_definition(
    family: str, part: str, task: str, estimator: str, samples: int | None, sharing: str
) -> None:
    made, rows = looked(family, part, task)
    expected = brute_force.kfac(made, rows, pulls(made, rows, estimator, samples), sharing)
    found = run(made, estimator=estimator, num_samples=samples, structure="kronecker", sharing=sharing, gradient=False)
    assert error(found.curvature.dense(), expected) < TOLERANCE.get(family, 1e-7)
