from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_bayes.methods.laplace.estimators import Terms, build_estimator
from hf_bayes.methods.laplace.supported import STRUCTURES, CurvatureSpec
from hf_bayes.models.attaching import attach
from hf_bayes.objectives.curvature_pass import CurvaturePassResult, PassData, run_curvature_pass
from hf_bayes.objectives.curvature_streams import curvature_products, row_gradients
from hf_bayes.uncertainty.custom.weighted import Weighted, WeightedRows
from hf_bayes.uncertainty.likelihoods import Normal
from tests.methods.laplace import brute_force
from tests.methods.laplace.brute_force import Problem
from tests.objectives.curvature_problems import error, evaluated, run

pytestmark = pytest.mark.models

WEIGHTS = (3.0, 0.0, 0.25)
"""The weights of the three rows of a problem."""

SHARED = [(structure, "expand") for structure in STRUCTURES]
SHARED += [(structure, "reduce") for structure in STRUCTURES if structure.startswith("kronecker")]


def test_random_signs_and_labels_average_to_the_exact_curvature() -> None:
    made, _ = evaluated("gpt2", "head", "lm")
    for estimator in ("ef_token", "ggn"):
        exact = run(made, estimator=estimator, num_samples=None, structure="full", gradient=False).curvature.dense()
        mean = run(made, estimator=estimator, num_samples=400, structure="full", gradient=False).curvature.dense()
        # an outer product differs from its mean about as much as its mean is large; 3 rows x 400 draws
        assert float((mean - exact).norm() / exact.norm()) < 4 / (3 * 400) ** 0.5
        other = run(made, estimator="ef_sequence", structure="full", gradient=False).curvature.dense()
        assert float((other - exact).norm() / exact.norm()) > 4 / (3 * 400) ** 0.5  # the broken twin


def weighted_batches(
    made: Problem, copies: Sequence[int], weights: Sequence[float], size: int
) -> Callable[[Sequence[int]], list[dict[str, Tensor]]]:
    """Return the batches of the rows ``copies`` of a problem, whose labels carry ``weights``."""

    def batches(numbers: Sequence[int]) -> list[dict[str, Tensor]]:
        found = []
        for start in range(0, len(numbers), size):
            part = numbers[start : start + size]
            rows = [made.rows[copies[number]] for number in part]
            labels = torch.stack([
                torch.tensor([float(made.rows[copies[number]]["labels"]), weights[number]], dtype=torch.float64)
                for number in part
            ])  # fmt: skip
            found.append(brute_force.pad(rows) | {"labels": labels})
        return found

    return batches


def weighted_run(
    made: Problem, copies: Sequence[int], weights: Sequence[float], *, batch: int = 3, **spec: Any
) -> CurvaturePassResult:
    """Return the result of a curvature pass on rows with weights."""
    noise = brute_force.NOISE if made.task == "regression" else None
    batches = weighted_batches(made, copies, weights, batch)
    with attach(made.model, subspace=made.subspace, noise_std=noise, likelihood=Weighted()) as model:
        return run_curvature_pass(model, model.theta[0].detach(), batches, len(copies), CurvatureSpec(**spec))


@pytest.mark.parametrize(
    ("family", "part", "task"),
    [("bert", "block", "classes"), ("gpt2", "lora", "classes"), ("bert", "head", "regression")],
)
@pytest.mark.parametrize(("structure", "sharing"), SHARED)
@pytest.mark.parametrize("estimator", ["ef_sequence", "ef_token"])
def test_a_row_of_weight_three_counts_as_three_copies(
    family: str, part: str, task: str, structure: str, sharing: str, estimator: str
) -> None:
    made, _ = evaluated(family, part, task)
    spec = {"estimator": estimator, "num_samples": None, "structure": structure, "sharing": sharing}
    # a copy of weight 1/4 is a quarter of a row: four times the weights are 12, 0 and 1 copies
    found = weighted_run(made, (0, 1, 2), [4 * weight for weight in WEIGHTS], **spec)
    copies = weighted_run(made, (0,) * 12 + (2,), (1.0,) * 13, batch=5, **spec)
    assert error(found.curvature.dense(), copies.curvature.dense()) < 1e-8
    assert found.gradient is not None
    assert copies.gradient is not None
    assert error(found.gradient.mean, copies.gradient.mean) < 1e-8
    # small weights, and other batches
    small = weighted_run(made, (0, 1, 2), WEIGHTS, batch=1, **spec)
    assert error(4 * small.curvature.dense(), copies.curvature.dense()) < 1e-8


def test_the_hessian_counts_a_row_of_weight_three_three_times() -> None:
    made, _ = evaluated("bert", "head", "classes")
    spec = {"estimator": "hessian", "structure": "full"}
    found = weighted_run(made, (0, 1, 2), (3.0, 0.0, 1.0), **spec).curvature.dense()
    assert error(found, weighted_run(made, (0, 0, 0, 2), (1.0,) * 4, **spec).curvature.dense()) < 1e-10


def test_small_weights_scale_a_kronecker_curvature() -> None:
    made, _ = evaluated("bert", "head", "classes")
    spec = {"estimator": "ef_sequence", "structure": "kronecker"}
    found = weighted_run(made, (0, 1, 2), [weight / 64 for weight in WEIGHTS], **spec).curvature.dense()
    assert error(64 * found, weighted_run(made, (0, 1, 2), WEIGHTS, **spec).curvature.dense()) < 1e-10
    nothing = weighted_run(made, (0, 1, 2), (0.0,) * 3, **spec).curvature.dense()
    assert not nothing.any()


def test_products_and_gradients_of_rows_have_their_weights() -> None:
    made, _ = evaluated("bert", "block", "classes")
    rows, data = (0, 1, 2), {}
    for weights in (WEIGHTS, (1.0, 1.0, 1.0)):
        with attach(made.model, subspace=made.subspace, likelihood=Weighted()) as model:
            theta = model.theta[0].detach()
            batches = PassData(weighted_batches(made, rows, weights, 2), 3, 1.0, 0, None, nullcontext)
            gradients = row_gradients(model, theta, batches, [0, 1, 2])
            vectors = torch.ones(1, len(theta), dtype=torch.float64)
            data[weights] = (
                gradients,
                curvature_products(model, theta, batches, build_estimator("ef_sequence", None), vectors),
            )
    each = data[1.0, 1.0, 1.0][0]
    weights = torch.tensor(WEIGHTS, dtype=torch.float64)
    assert error(data[WEIGHTS][0], weights[:, None] * each) < 1e-10  # the gradients of w log p
    assert error(data[WEIGHTS][1], (each.sum(1) * weights)[None] @ each) < 1e-10


@pytest.mark.parametrize("num_samples", [None, 1])
@pytest.mark.parametrize("name", ["ef_sequence", "ef_token"])
def test_cotangents_have_the_root_of_the_weight(name: str, num_samples: int | None) -> None:
    logits, labels = torch.tensor([[0.5], [1.0], [-1.0]]), torch.tensor([[1.0, 4.0], [0.0, 0.0], [0.0, 0.25]])
    terms = Terms(logits, labels, torch.zeros(3, dtype=torch.int64), torch.full((1, 3, 1), 0.7))
    found = build_estimator(name, num_samples).cotangent(0, terms, WeightedRows(Weighted(), Normal(1.0)))
    assert torch.allclose(found, torch.tensor([[1.0], [0.0], [0.5]]))
