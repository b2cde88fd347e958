from __future__ import annotations

from typing import Any

import pytest

from hf_bayes.posteriors.storage.json_types import is_texts


@pytest.mark.parametrize(
    ("value", "expected"), [([], True), (["a"], True), (["a", 1], False), ("a", False), ({}, False), (None, False)]
)
def test_only_a_list_of_texts_is_texts(value: Any, expected: bool) -> None:
    assert is_texts(value) == expected
