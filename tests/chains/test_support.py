"""Exceptions that mean a density of 0 are told from mistakes in an energy."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from hf_bayes.chains.support import is_outside_support


def raised_by(call: Callable[[], object]) -> Exception:
    with pytest.raises(Exception) as found:  # its kind is what is judged
        call()
    return found.value


def by_the_user() -> None:
    raise ValueError("a mistake")


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda: torch.linalg.cholesky(-torch.eye(2)), True),
        (lambda: 1 / 0, True),
        (lambda: torch.distributions.Normal(0.0, torch.tensor(-1.0), validate_args=True), True),
        (by_the_user, False),
        (lambda: torch.ones(2) @ torch.ones(3), False),
    ],
    ids=["no Cholesky factor", "division by 0", "constraint of a distribution", "ValueError", "shapes"],
)
def test_only_numerical_errors_mean_a_density_of_zero(call: Callable[[], object], expected: bool) -> None:
    assert is_outside_support(raised_by(call)) is expected
