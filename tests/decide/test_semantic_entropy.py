"""Semantic entropy of answers of members."""

from __future__ import annotations

import math
import random

import pytest

from hf_bayes.decide.semantic_entropy import answers_of_members, semantic_entropy
from hf_bayes.pipelines.factory import pipeline
from tests.pipelines.built import PROMPTS, bayesian
from tests.tiny_models import tiny_tokenizer

NUM_MEMBERS, NUM_ANSWERS, NUM_DRAWS = 4, 20, 300


def mean_epistemic(
    *, corrected: bool, num_answers: int = NUM_ANSWERS, probs: tuple[float, ...] = (1.0, 1.0, 1.0)
) -> float:
    """Return the mean over draws for members that are alike: each answers "a", "b" or "c" with these odds."""
    random_ = random.Random(0)
    draws = [[random_.choices("abc", probs, k=num_answers) for _ in range(NUM_MEMBERS)] for _ in range(NUM_DRAWS)]
    return sum(semantic_entropy(answers, corrected=corrected).epistemic.item() for answers in draws) / NUM_DRAWS


def test_members_that_contradict_each_other_are_epistemic() -> None:
    total, aleatoric, epistemic = semantic_entropy([["Paris", "paris."], ["Rome", "Rome"]])
    assert (total.item(), aleatoric.item(), epistemic.item()) == pytest.approx((math.log(2), 0, math.log(2)))


def test_members_that_all_hesitate_are_aleatoric() -> None:
    total, aleatoric, epistemic = semantic_entropy([["Paris", "Rome"], ["Rome", "Paris"]])
    assert (total.item(), aleatoric.item(), epistemic.item()) == pytest.approx((math.log(2), math.log(2), 0))


def test_words_of_one_meaning_have_no_entropy() -> None:
    assert semantic_entropy([["a", "b"], ["c", "d"]], lambda one, other: True).total == 0
    assert semantic_entropy([["a", "b"], ["c", "d"]]).total.item() == pytest.approx(math.log(4))


def test_equal_members_have_nearly_no_corrected_eu() -> None:
    # the expected bias is 2 (1 - 1/4) / 40 = 0.0375; corrected, values below 0 become 0, so the mean is above 0
    assert mean_epistemic(corrected=True) < 0.0375 / 2


def test_the_bias_without_correction_is_the_one_that_is_stated() -> None:
    """The broken twin of the test above."""
    assert mean_epistemic(corrected=False) == pytest.approx(0.0375, rel=0.2)  # 4 standard errors are 0.15


@pytest.mark.parametrize(("probs", "removed"), [((0.9, 0.05, 0.05), 0.12), ((1.0, 1.0, 1.0), 0.51)])
def test_five_answers_leave_half_of_the_bias_or_more(probs: tuple[float, ...], removed: float) -> None:
    raw, corrected = (mean_epistemic(corrected=value, num_answers=5, probs=probs) for value in (False, True))
    # the true value is 0. A mean of 300 values whose spread is their size has an error of 6 %, and both share the draws
    assert 1 - corrected / raw == pytest.approx(removed, abs=0.06)


def test_each_member_answers_alone() -> None:
    generate = pipeline("bayesian-text-generation", bayesian(), tiny_tokenizer())
    found = answers_of_members(generate.model, generate, PROMPTS[1], 2, max_new_tokens=3)
    assert [len(texts) for texts in found] == [2, 2, 2]
    assert generate.model.num_members == 3
    greedy = answers_of_members(generate.model, generate, PROMPTS[1], 1, max_new_tokens=4, top_k=1)
    with generate.model.showing(generate.model.theta[1:2]):
        (alone,) = generate(PROMPTS[1], max_new_tokens=4, do_sample=False, return_full_text=False)
    assert greedy[1] == [alone["generated_text"]]


def test_members_with_different_numbers_of_answers_are_refused() -> None:
    for answers in ([], [[]], [["a"], ["a", "b"]]):
        with pytest.raises(ValueError, match="the same number of answers of each member"):
            semantic_entropy(answers)
