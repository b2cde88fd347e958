from __future__ import annotations

from typing import Any

import pytest

from hf_bayes.cli.evaluation.cases import CASES, case_of, head_of, own_arguments
from hf_bayes.cli.evaluation.texts import TextArguments
from hf_bayes.cli.evaluation.windows import WindowArguments
from hf_bayes.posteriors.config import PosteriorConfig
from hf_bayes.uncertainty.custom.base import LikelihoodConfig
from hf_bayes.uncertainty.custom.heteroscedastic import Heteroscedastic
from hf_bayes.uncertainty.custom.mixture_density import MixtureDensity
from hf_bayes.uncertainty.custom.ordinal import Ordinal
from hf_bayes.uncertainty.custom.poisson import Poisson
from hf_bayes.uncertainty.custom.weighted import Weighted
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


CLASSES = {"labels": ["a", "b"]}
OWN = [
    (Poisson(), {"labels": ["LABEL_0"]}, "own_numbers", 1),
    (Heteroscedastic(), CLASSES, "own_numbers", 1),
    (MixtureDensity(2, num_numbers=3), {"labels": [str(number) for number in range(14)]}, "own_numbers", 3),
    (Ordinal(num_classes=3), CLASSES, "classes", 3),
    (Weighted(), CLASSES, "classes", 2),
    (Weighted(), CLASSES | {"problem_type": "regression", "noise_std": 1.0}, "numbers", 2),
    (Weighted(Heteroscedastic()), CLASSES, "own_numbers", 1),
]


@pytest.mark.parametrize(("likelihood", "head", "kind", "count"), OWN, ids=lambda given: getattr(given, "name", ""))
def test_a_likelihood_chooses_the_evaluation(
    likelihood: LikelihoodConfig, head: dict[str, Any], kind: str, count: int
) -> None:
    config = config_of("sequence_classification", head | {"likelihood": likelihood.to_dict()})
    assert case_of(config, "out").figures.kind == kind
    assert len(head_of(config, "out")["labels"]) == count


@pytest.mark.parametrize(
    ("stored", "words"),
    [
        ({"name": "my_noise"}, "out has the likelihood my_noise, and a command does not import the module"),
        ({"name": "bradley_terry"}, "whose rows are pairs of texts"),
        ({"name": "ordinal"}, r"has the fields \[\], expected"),
    ],
)
def test_a_likelihood_that_no_command_reads_is_refused(stored: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        case_of(config_of("sequence_classification", {"labels": ["a"], "likelihood": stored}), "out")


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
