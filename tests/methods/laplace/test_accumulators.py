from __future__ import annotations

import pytest
import torch

from tests.methods.laplace import brute_force
from tests.objectives.curvature_problems import CELLS, TOLERANCE, cotangents, error, evaluated, problems, run

pytestmark = pytest.mark.models


@problems
@pytest.mark.parametrize(("estimator", "samples"), CELLS)
def test_full_diagonal_and_low_rank_are_those_of_brute_force(
    family: str, part: str, task: str, estimator: str, samples: int | None
) -> None:
    made, rows = evaluated(family, part, task)
    expected = brute_force.outer(rows, cotangents(made, rows, estimator, samples))
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
    assert error(found.gradient.mean, torch.as_tensor(slope)) < tolerance


@problems
@pytest.mark.parametrize("rank", [3, 8])
def test_a_low_rank_keeps_the_largest_directions(family: str, part: str, task: str, rank: int) -> None:
    made, rows = evaluated(family, part, task)
    values, vectors = torch.linalg.eigh(brute_force.outer(rows, cotangents(made, rows, "ef_token", None)))
    expected = vectors[:, -rank:] * values[-rank:] @ vectors[:, -rank:].T  # at most nine terms: the sketch has them all
    found = run(made, estimator="ef_token", num_samples=None, structure="low_rank", rank=rank, gradient=False)
    assert found.curvature.columns.shape[1] <= rank  # type: ignore[attr-defined]
    assert error(found.curvature.dense(), expected) < TOLERANCE.get(family, 1e-7)
