from __future__ import annotations

from typing import Any

import pytest

from hf_bayes.posteriors.storage.json_types import (
    is_boolean,
    is_integer,
    is_list,
    is_number,
    is_object,
    is_text,
    is_texts,
)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({}, {is_object}),
        ([], {is_list, is_texts}),
        (["a"], {is_list, is_texts}),
        (["a", 1], {is_list}),
        ("a", {is_text}),
        (True, {is_boolean}),
        (1, {is_integer, is_number}),
        (1.0, {is_number}),
        (None, set()),
    ],
    ids=repr,
)
def test_every_value_has_the_types_of_json(value: Any, expected: set[Any]) -> None:
    every = (is_boolean, is_integer, is_list, is_number, is_object, is_text, is_texts)
    assert {question for question in every if question(value)} == expected


def test_an_integer_lies_from_low_to_below_high() -> None:
    assert [value for value in range(5) if is_integer(value, 1, 4)] == [1, 2, 3]
