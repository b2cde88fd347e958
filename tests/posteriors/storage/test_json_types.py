from __future__ import annotations

from typing import Any

import pytest

from hf_bayes.posteriors.storage.json_types import as_list, has_keys, is_texts, require_object


@pytest.mark.parametrize(
    ("value", "expected"), [([], True), (["a"], True), (["a", 1], False), ("a", False), ({}, False), (None, False)]
)
def test_only_a_list_of_texts_is_texts(value: Any, expected: bool) -> None:
    assert is_texts(value) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [({"a": 1, "b": 2}, True), ({"a": 1}, False), ({"a": 1, "b": 2, "c": 3}, False), ("ab", False)],
)
def test_an_object_needs_all_of_its_keys_and_no_others(value: Any, expected: bool) -> None:
    assert has_keys(value, ("a", "b")) == expected


@pytest.mark.parametrize(("value", "expected"), [([1, 2], [1, 2]), ([], []), (1, [1]), ("ab", ["ab"]), (None, [None])])
def test_a_value_that_is_no_list_becomes_a_list_of_one(value: Any, expected: list[Any]) -> None:
    assert as_list(value) == expected


def test_only_an_object_passes_as_an_object() -> None:
    value = {"a": 1}
    assert require_object(value, "a.json") is value
    with pytest.raises(ValueError, match=r"a\.json must hold a JSON object, got list"):
        require_object([value], "a.json")
