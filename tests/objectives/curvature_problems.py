"""Tiny problems with brute-force curvatures, and a curvature pass over each."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from hf_bayes.core.rng import generator
from hf_bayes.methods.laplace.supported import STRUCTURES, CurvatureSpec
from hf_bayes.models.attaching import attach
from hf_bayes.objectives.curvature_pass import CurvaturePassResult, run_curvature_pass
from tests.methods.laplace import brute_force
from tests.methods.laplace.brute_force import Problem, Row, problem

PROBLEMS = [
    (family, part, task)
    for family, task in (
        ("gpt2", "lm"),
        ("llama", "lm"),
        ("gpt2", "classes"),  # decoders: every token is scored, the last one read
        ("llama", "classes"),
        ("bert", "classes"),
        ("bert", "regression"),
        ("bert", "tokens"),
    )
    for part in ("lora", "head", "block")
]

problems = pytest.mark.parametrize(("family", "part", "task"), PROBLEMS, ids=["-".join(p) for p in PROBLEMS])

TOLERANCE = {"llama": 1e-5}
"""Relative to the largest entry. Llama-like models compute norms in float32; the others are float64 throughout."""

_CACHE: dict[Any, tuple[Problem, list[Row]]] = {}


def evaluated(family: str, part: str, task: str) -> tuple[Problem, list[Row]]:
    key = (family, part, task)
    if key not in _CACHE:
        made = problem(*key)
        _CACHE[key] = (made, brute_force.evaluate_rows(made))
    return _CACHE[key]


def run(made: Problem, *, batch: int = 3, **changes: Any) -> CurvaturePassResult:
    options = {k: changes.pop(k) for k in ("scale", "gradient", "seed") if k in changes}
    noise = brute_force.NOISE if made.task == "regression" else None
    with attach(made.model, subspace=made.subspace, noise_std=noise) as model:
        theta, spec = model.theta[0].detach(), CurvatureSpec(**changes)
        return run_curvature_pass(model, theta, made.batches(batch), len(made.rows), spec, **options)


def cotangents(made: Problem, rows: list[Row], estimator: str, samples: int | None) -> list[list[Tensor]]:
    streams = brute_force.uniform_streams(rows, lambda s, row: generator(0, "labels", s, row), samples or 0)
    return brute_force.cotangents(made, rows, estimator, samples, streams)


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


CELLS = [("ggn", None), ("ggn", 2), ("ef_sequence", 1), ("ef_token", None), ("ef_token", 2)]

SHARED = [(structure, "expand") for structure in STRUCTURES]
