from __future__ import annotations

from typing import Any

import pytest

from hf_bayes.core.number_checks import is_integer, is_number
from hf_bayes.posteriors.storage.json_types import is_texts


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({}, ()),
        ([], ("is_texts",)),
        (["a"], ("is_texts",)),
        (["a", 1], ()),
        ("a", ()),
        (True, ()),
        (1, ("is_integer", "is_number")),
        (1.0, ("is_number",)),
        (None, ()),
    ],
    ids=repr,
)
def test_every_value_has_the_types_of_json(value: Any, expected: tuple[str, ...]) -> None:
    questions = (is_integer, is_number, is_texts)
    assert tuple(question.__name__ for question in questions if question(value)) == expected


def test_an_integer_lies_from_low_to_below_high() -> None:
    assert [value for value in range(5) if is_integer(value, 1, 4)] == [1, 2, 3]
