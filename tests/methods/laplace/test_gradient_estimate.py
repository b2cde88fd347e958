"""The gradient from a part of the rows: the choice of the rows, and unbiased squares."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from hf_bayes.methods.laplace import gradient_estimate
from hf_bayes.methods.laplace.gradient_estimate import GradientEstimate, draw_half_batches
from hf_bayes.methods.laplace.supported import CurvatureSpec
from hf_bayes.models.attaching import attach
from hf_bayes.objectives.curvature_pass import run_curvature_pass
from tests.methods.laplace import brute_force
from tests.methods.laplace.brute_force import problem

pytestmark = pytest.mark.models


def every_choice(num_rows: int, size: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    choices = itertools.combinations(range(num_rows), 2 * size)
    return [
        (first, tuple(row for row in rows if row not in first))
        for rows in choices
        for first in itertools.combinations(rows, size)
    ]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_square_is_right_on_average_over_all_choices_of_rows(size: int) -> None:
    torch.manual_seed(0)
    rows, offset, root = (torch.randn(shape, dtype=torch.float64) for shape in ((6, 4), (4,), (4, 4)))
    matrix = root @ root.T
    whole = rows.sum(0) + offset
    squares, alone = [], []
    for first, second in every_choice(6, size):
        found = GradientEstimate(6 / size * torch.stack([rows[[*first]].sum(0), rows[[*second]].sum(0)]), 2 * size, 6)
        squares.append(found.square(offset, lambda v: v @ matrix))
        alone.append(
            float((found.half_batch_gradients[0] + offset) @ matrix @ (found.half_batch_gradients[1] + offset))
        )
        if size == 3:  # all rows: exact, whatever the halves
            assert squares[-1] == pytest.approx(float(whole @ matrix @ whole), rel=1e-12)
    exact = float(whole @ matrix @ whole)
    assert sum(squares) / len(squares) == pytest.approx(exact, rel=1e-12)
    assert sum(alone) / len(alone) < exact - 1  # the twin: halves that share no row are anticorrelated


def test_small_problems_use_all_rows_and_large_ones_a_sixteenth() -> None:
    assert draw_half_batches(128, 10**6, 0) is None
    assert draw_half_batches(10**5, 1 << 14, 0) is None
    first, second = draw_half_batches(10**4, 10**6, 0) or ([], [])
    assert len(first) == len(second) == 312
    assert len({*first, *second}) == 624
    assert first == sorted(first)
    assert (draw_half_batches(10**4, 10**6, 0) or [])[0] == first != (draw_half_batches(10**4, 10**6, 1) or [])[0]


@pytest.mark.parametrize(("family", "part", "task"), [("llama", "lora", "lm"), ("bert", "block", "classes")])
@pytest.mark.parametrize("batch", [1, 3])
def test_halves_are_the_scaled_gradients_of_their_rows(
    family: str, part: str, task: str, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = problem(family, part, task)
    made.rows = [*made.rows, *made.rows[::-1]][:5]
    monkeypatch.setattr(gradient_estimate, "SMALL", 0)
    monkeypatch.setattr(gradient_estimate, "LEAST_ROWS", 4)
    chosen = draw_half_batches(5, made.layout.dim, 3)
    assert chosen is not None
    with attach(made.model, subspace=made.subspace) as model:
        theta = model.theta[0].detach()
        found = run_curvature_pass(model, theta, made.batches(batch), 5, CurvatureSpec(), scale=2.0, seed=3).gradient
        free = run_curvature_pass(
            model, theta, made.batches(batch), 5, CurvatureSpec(estimator="ef_sequence"), seed=3
        ).gradient
    assert found is not None
    assert free is not None
    assert (found.num_rows, found.num_data_rows, free.num_rows) == (4, 5, 5)
    rows = brute_force.evaluate_rows(made)
    each = [
        torch.einsum("tcd,tc->d", row.jacobian, brute_force.score(made, row.logits, row.labels)).double()
        for row in rows
    ]
    for half, numbers in zip(found.half_batch_gradients, chosen, strict=True):
        close(half, 2.0 * 5 / 2 * sum((each[number] for number in numbers), torch.zeros_like(each[0])))
    close(free.mean, sum(each, torch.zeros_like(each[0])))


def close(found: Tensor, expected: Tensor) -> None:
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()  # Llama computes norms in float32
