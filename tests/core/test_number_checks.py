from __future__ import annotations

import math
from typing import Any

import pytest

from hf_bayes.core.number_checks import is_count, is_finite_number


@pytest.mark.parametrize(
    ("value", "fine"), [(1, True), (0, False), (-1, False), (True, False), (1.0, False), ("1", False)]
)
def test_a_count_is_an_integer_of_at_least_one(value: Any, fine: bool) -> None:
    assert is_count(value) == fine


def test_a_count_may_start_elsewhere() -> None:
    assert [is_count(value, minimum=0) for value in (-1, 0, 1)] == [False, True, True]


@pytest.mark.parametrize(
    ("value", "fine"), [(0.5, True), (3, True), (math.inf, False), (math.nan, False), (True, False), (None, False)]
)
def test_a_finite_number_is_no_truth_value_and_no_infinity(value: Any, fine: bool) -> None:
    assert is_finite_number(value) == fine
