from __future__ import annotations

from typing import Any

import pytest
import torch
from scipy.sparse.linalg import eigsh
from torch import Tensor

from hf_bayes.core.layout import Layout
from hf_bayes.core.rng import generator
from hf_bayes.fit.curvature_operator import CurvatureOperator

DIM = 100


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator("operator", *shape), dtype=torch.float64)


MATRIX = numbers(DIM, 30) @ numbers(DIM, 30).mT


def operator(dtype: torch.dtype = torch.float64) -> CurvatureOperator:
    matrix = MATRIX.to(dtype)
    return CurvatureOperator(lambda vectors: vectors @ matrix, Layout(("a",), ((DIM,),)), matrix[0])


def test_a_linear_system_is_solved_by_products_alone() -> None:
    vector = numbers(DIM)
    for damping in (0.5, numbers(DIM).exp()):
        expected = torch.linalg.solve(MATRIX + torch.diag(torch.as_tensor(damping).expand(DIM).double()), vector)
        for preconditioner in (None, MATRIX.diagonal() + damping):
            found = operator().solve(vector, damping, preconditioner=preconditioner)
            # the residual is 1e-10 |v|, and the smallest eigenvalue about .1
            assert (found - expected).norm() < 1e-8 * vector.norm()


def test_single_precision_has_a_tolerance_of_its_own() -> None:
    found = operator(torch.float32).solve(numbers(DIM).float(), 1.0)
    expected = torch.linalg.solve(MATRIX + torch.eye(DIM), numbers(DIM))
    assert found.dtype == torch.float32
    assert (found - expected).norm() < 1e-3 * expected.norm()


def test_the_matrix_and_scipy_see_the_same_operator() -> None:
    assert torch.equal(operator().matrix(), (MATRIX + MATRIX.mT) / 2)
    largest = eigsh(operator().as_linear_operator(2.0), k=1, return_eigenvectors=False)
    assert largest[0] == pytest.approx(float(torch.linalg.eigvalsh(MATRIX)[-1]) + 2)


def test_a_system_that_does_not_converge_is_refused() -> None:
    with pytest.raises(ValueError, match=r"reached a relative residual of \d.* in 3 iterations, wanted 1e-10: raise"):
        operator().solve(numbers(DIM), 1e-6, max_iterations=3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: operator().product(torch.ones(3)), r"vectors must be a tensor \[..., 100\], got \[3\]"),
        (lambda: operator().solve(numbers(DIM), -1.0), "damping must be finite and >= 0, got -1.0"),
        (lambda: operator().solve(torch.ones(3), 1.0), r"a vector must have the shape \[100\], got \[3\]"),
        (lambda: operator().solve(numbers(DIM), 1.0, tolerance=2.0), r"tolerance must be a number in \(0, 1\), got 2"),
        (lambda: operator().solve(numbers(DIM), 1.0, max_iterations=0), "max_iterations must be an integer >= 1"),
        (
            lambda: CurvatureOperator(lambda v: v, Layout(("a",), ((9000,),)), torch.ones(9000)).matrix(),
            "9000 x 9000 elements; the limit is 8192: use product or solve",
        ),
    ],
)
def test_bad_arguments_are_refused_in_words(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
