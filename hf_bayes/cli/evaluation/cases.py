"""The evaluations by task and kind of labels, one row for each.

Under a user's likelihood (``uncertainty.custom``) the labels of texts are classes 0..K-1 or D numbers, whatever the
outputs of the head are. Weights of rows are left out, as in every evaluation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from hf_bayes.cli.evaluation.case import Case
from hf_bayes.cli.evaluation.classes import CLASS_CASE
from hf_bayes.cli.evaluation.labels import LABEL_CASE
from hf_bayes.cli.evaluation.numbers import NUMBER_CASE, OWN_NUMBER_CASE
from hf_bayes.cli.evaluation.windows import WINDOW_CASE
from hf_bayes.cli.evaluation.words import WORD_CASE
from hf_bayes.models.base import BayesianModel
from hf_bayes.models.loading.base_model import describe_head
from hf_bayes.posteriors.config import PosteriorConfig
from hf_bayes.uncertainty.custom.adapted import Adapted
from hf_bayes.uncertainty.custom.base import CustomLikelihood
from hf_bayes.uncertainty.custom.registry import LIKELIHOODS, likelihood_from
from hf_bayes.uncertainty.custom.weighted import Weighted

CASES: dict[tuple[str, str | None], Case] = {
    ("causal_lm", None): WINDOW_CASE,
    ("sequence_classification", "single_label_classification"): CLASS_CASE,
    ("sequence_classification", "multi_label_classification"): LABEL_CASE,
    ("sequence_classification", "regression"): NUMBER_CASE,
    ("token_classification", None): WORD_CASE,
}
"""The task of a posterior, and the problem that its head solves if the task has several -> its evaluation."""


def described(config: PosteriorConfig, model: BayesianModel) -> PosteriorConfig:
    """Return the config of a posterior with the head of its loaded model, which adapters trained elsewhere lack."""
    head = describe_head(model.core, model.likelihood.noise_std)
    return dataclasses.replace(config, head={**config.head, **head})


def case_of(config: PosteriorConfig, what: str) -> Case:
    """Return the evaluation of a posterior.

    Args:
        what: the name of the posterior in errors.
    Raises:
        ValueError: for a task or a likelihood without an evaluation.
    """
    problems = [problem for task, problem in CASES if task == config.task]
    if not problems:
        known = " or ".join(dict.fromkeys(task for task, _ in CASES))
        raise ValueError(f"{what} is a posterior for {config.task}, expected {known}: use hf_bayes.metrics")
    if (own := _own_likelihood(config.head, what)) is not None:
        return OWN_NUMBER_CASE if own.num_classes is None else CLASS_CASE
    return CASES[config.task, None if None in problems else _problem(config.head)]


def head_of(config: PosteriorConfig, what: str) -> dict[str, Any]:
    """Return the head of a posterior with a name in ``labels`` for each class or number of a label.

    Under a user's likelihood the outputs of the head are others: classes then have their numbers as names.
    """
    own = _own_likelihood(config.head, what)
    if own is None:
        return config.head
    return config.head | {"labels": [str(number) for number in range(own.num_classes or own.config.label_size)]}


def _own_likelihood(head: dict[str, Any], what: str) -> Adapted | None:
    """Return the user's likelihood without weights; None for the likelihood of the head."""
    stored = head.get("likelihood")
    if stored is None:
        return None
    if (name := stored.get("name")) not in LIKELIHOODS:
        raise ValueError(
            f"{what} has the likelihood {name}, and a command does not import the module that defines it: load the "
            "posterior in a script that does, and call evaluate of a BayesianTrainer or model.evaluate_batch"
        )
    given = likelihood_from(stored)
    found = given.of if isinstance(given, Weighted) else given
    if found is None:
        return None
    if not isinstance(found, CustomLikelihood):
        raise ValueError(
            f"{what} has the likelihood {name}, whose rows are pairs of texts, and this command reads single texts: "
            "call evaluate of a BayesianTrainer (docs/rewards.md)"
        )
    return Adapted(found, len(head["labels"]))


def own_arguments(case: Case, given: Sequence[Any], what: str) -> Any:
    """Return the arguments of a case.

    Args:
        given: the parsed arguments of every case.
        what: the name of the posterior in errors.
    Raises:
        ValueError: for arguments of another case that are not at their defaults.
    """
    own = next(each for each in given if isinstance(each, case.arguments))
    for other in given:
        if other is not own:
            refuse_changes(other, f"the task of the posterior {what}")
    return own


def refuse_changes(arguments: Any, task: str) -> None:
    """Check that the arguments of another task are at their defaults.

    Args:
        task: the words for the task in the error.
    Raises:
        ValueError: naming the arguments that are not.
    """
    fields = dataclasses.fields(arguments)
    if changed := [f"--{each.name}" for each in fields if getattr(arguments, each.name) != each.default]:
        raise ValueError(f"{', '.join(changed)}: not for {task}, leave it out")


def _problem(head: dict[str, Any]) -> str:
    """Return the problem as the model's class reads it: one output without a name of the problem is a regression."""
    by_default = "regression" if len(head["labels"]) == 1 else "single_label_classification"
    return str(head.get("problem_type") or by_default)
