from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_bayes.fit.model_curvature import curvature_of_model, row_gradients_of_model
from hf_bayes.models.attaching import attach
from tests.methods.laplace import brute_force
from tests.objectives.curvature_problems import TOLERANCE, cotangents, error, evaluated, run

pytestmark = pytest.mark.models

CASES = pytest.mark.parametrize(
    ("family", "part", "task"),
    [("gpt2", "block", "lm"), ("llama", "lora", "classes"), ("bert", "lora", "tokens"), ("bert", "head", "regression")],
)


def options(made: brute_force.Problem) -> dict[str, Any]:
    noise = brute_force.NOISE if made.task == "regression" else None
    return {"collate": brute_force.pad, "batch_size": 2, "subspace": made.subspace, "noise_std": noise}


@CASES
@pytest.mark.parametrize(("estimator", "samples"), [("ggn", None), ("ggn", 2), ("ef_sequence", 1), ("ef_token", None)])
def test_products_are_those_of_the_dense_curvature(
    family: str, part: str, task: str, estimator: str, samples: int | None
) -> None:
    made, rows = evaluated(family, part, task)
    expected = brute_force.outer(rows, cotangents(made, rows, estimator, samples))
    operator = curvature_of_model(made.model, made.rows, estimator=estimator, num_samples=samples, **options(made))
    assert operator.layout == made.layout
    vectors = torch.randn(3, operator.dim, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert error(operator.product(vectors), vectors @ expected) < TOLERANCE.get(family, 1e-10)
    assert error(operator.matrix(), expected) < TOLERANCE.get(family, 1e-10)


@CASES
def test_gradients_of_rows_stream_in_order(family: str, part: str, task: str) -> None:
    made, rows = evaluated(family, part, task)
    found = list(row_gradients_of_model(made.model, made.rows, **options(made)))
    assert [len(piece) for piece in found] == [2, 1]
    scores = cotangents(made, rows, "ef_sequence", 1)
    expected = torch.stack(
        [torch.einsum("tcd,tc->d", row.jacobian, own[0]) for row, own in zip(rows, scores, strict=True)]
    )
    assert error(torch.cat(found), expected) < TOLERANCE.get(family, 1e-10)


def test_a_hessian_has_products_too() -> None:
    made, _ = evaluated("bert", "head", "classes")
    matrix = run(made, estimator="hessian", structure="full").curvature.dense()
    operator = curvature_of_model(made.model, made.rows, estimator="hessian", **options(made))
    assert error(operator.matrix(), matrix) < 1e-12


def test_a_system_with_the_prior_is_solved() -> None:
    made, rows = evaluated("bert", "head", "classes")
    matrix = brute_force.outer(rows, cotangents(made, rows, "ggn", None))
    operator = curvature_of_model(made.model, made.rows, num_samples=None, **options(made))
    gradient = torch.cat(list(row_gradients_of_model(made.model, made.rows, **options(made)))).sum(0)
    expected = torch.linalg.solve(matrix + 4 * torch.eye(len(matrix)), gradient)
    assert torch.allclose(operator.solve(gradient, 4.0), expected, atol=1e-9)


def test_the_model_is_left_as_it_was() -> None:
    made, _ = evaluated("bert", "lora", "classes")
    before = {name: value.clone() for name, value in made.model.state_dict().items()}
    flags = [parameter.requires_grad for parameter in made.model.parameters()]
    operator = curvature_of_model(made.model, made.rows, **options(made))
    product = operator.product(torch.ones(operator.dim))
    next(row_gradients_of_model(made.model, made.rows, **options(made)))
    assert all(torch.equal(value, before[name]) for name, value in made.model.state_dict().items())
    assert [parameter.requires_grad for parameter in made.model.parameters()] == flags
    with attach(made.model, subspace=made.subspace) as bayesian:
        again = curvature_of_model(bayesian, made.rows, collate=brute_force.pad)
        assert torch.allclose(again.product(torch.ones(again.dim)), product, rtol=1e-10)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"estimator": "gnn"}, "estimator must be one of ggn"),
        ({"batch_size": 0}, "batch_size must be an integer >= 1, got 0"),
        ({"data": iter([])}, "data must have rows that can be counted"),
    ],
)
def test_bad_arguments_are_refused_in_words(changes: dict[str, Any], message: str) -> None:
    made, _ = evaluated("bert", "head", "classes")
    with pytest.raises(ValueError, match=message):
        curvature_of_model(made.model, **({"data": made.rows} | options(made) | changes))
