from __future__ import annotations

from typing import Any

import pytest

from hf_bayes.cli.evaluate_texts import TextArguments
from hf_bayes.cli.evaluate_windows import WindowArguments
from hf_bayes.cli.evaluation_cases import CASES, case_of, own_arguments
from hf_bayes.posteriors.config import PosteriorConfig
from tests.faults.posteriors import config


def config_of(task: str, head: dict[str, Any]) -> PosteriorConfig:
    return config(task=task, head=head)


@pytest.mark.parametrize(
    ("task", "head", "kind"),
    [
        ("causal_lm", {}, "next_tokens"),
        ("sequence_classification", {"labels": ["a", "b"]}, "classes"),
        ("sequence_classification", {"labels": ["a", "b"], "problem_type": "regression"}, "numbers"),
        ("sequence_classification", {"labels": ["LABEL_0"]}, "numbers"),
        ("sequence_classification", {"labels": ["a"], "problem_type": "multi_label_classification"}, "several_labels"),
        ("token_classification", {"labels": ["a"], "problem_type": "regression"}, "tags"),
    ],
)
def test_task_and_head_choose_the_evaluation(task: str, head: dict[str, Any], kind: str) -> None:
    case = case_of(config_of(task, head), "out")
    assert case.figures.kind == kind
    assert case.model_class.task == task


def test_a_posterior_of_another_task_is_refused() -> None:
    message = "out is a posterior for image_classification, expected causal_lm or sequence_classification or token_c"
    with pytest.raises(ValueError, match=message):
        case_of(config_of("image_classification", {"labels": ["a", "b"]}), "out")


def test_arguments_of_another_case_are_refused() -> None:
    given = [WindowArguments(length=64), TextArguments()]
    case = CASES["token_classification", None]
    with pytest.raises(ValueError, match="--length: not for the task of the posterior out, leave it out"):
        own_arguments(case, given, "out")
    assert own_arguments(case, [WindowArguments(), given[1]], "out") is given[1]
