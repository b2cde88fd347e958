from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from hf_bayes.core.number_checks import is_count, is_finite_number, is_integer, is_integral, is_number


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


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, ("is_integral", "is_integer", "is_number")),
        (np.int64(1), ("is_integral",)),
        (1.0, ("is_number",)),
        (True, ()),
        ("1", ()),
        (None, ()),
        ({}, ()),
    ],
    ids=repr,
)
def test_every_value_is_the_kinds_of_number_that_it_is(value: Any, expected: tuple[str, ...]) -> None:
    questions = (is_integral, is_integer, is_number)
    assert tuple(question.__name__ for question in questions if question(value)) == expected


def test_an_integer_lies_from_low_to_below_high() -> None:
    assert [value for value in range(5) if is_integer(value, 1, 4)] == [1, 2, 3]
