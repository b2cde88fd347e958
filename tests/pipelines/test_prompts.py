"""The beginning of an answer after its prompt."""

from __future__ import annotations

import pytest

from hf_bayes.pipelines.prompts import answer_start, prompts_of


def test_the_answer_begins_with_its_first_character() -> None:
    assert answer_start([(0, 0), (0, 2), (2, 4), (4, 6), (0, 0)], "abcd", "ef") == 3
    assert answer_start([(0, 2), (2, 5), (5, 6)], "abcd", "ef") == 1  # a token of both counts as the answer's


def test_an_answer_that_nothing_predicts_is_refused() -> None:
    with pytest.raises(ValueError, match="no token stands before the answer 'ef'"):
        answer_start([(0, 2)], "", "ef")
    with pytest.raises(ValueError, match="the answer '' has no token after its prompt"):
        answer_start([(0, 2)], "ab", "")


def test_prompts_are_as_many_as_texts() -> None:
    assert prompts_of("a", 2) == ["a", "a"]
    assert prompts_of(["a", "b"], 2) == ["a", "b"]
    for wrong in (["a"], ["a", 3], 5):
        with pytest.raises(ValueError, match="a string for each of the 2 texts"):
            prompts_of(wrong, 2)  # type: ignore[arg-type]
