"""The evaluations by task and kind of labels, one row for each."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from hf_bayes.cli.evaluate_classes import CLASS_CASE
from hf_bayes.cli.evaluate_labels import LABEL_CASE
from hf_bayes.cli.evaluate_numbers import NUMBER_CASE
from hf_bayes.cli.evaluate_windows import WINDOW_CASE
from hf_bayes.cli.evaluate_words import WORD_CASE
from hf_bayes.cli.evaluation import Case
from hf_bayes.posteriors.config import PosteriorConfig

CASES: dict[tuple[str, str | None], Case] = {
    ("causal_lm", None): WINDOW_CASE,
    ("sequence_classification", "single_label_classification"): CLASS_CASE,
    ("sequence_classification", "multi_label_classification"): LABEL_CASE,
    ("sequence_classification", "regression"): NUMBER_CASE,
    ("token_classification", None): WORD_CASE,
}
"""The task of a posterior, and the problem that its head solves if the task has several -> its evaluation."""


def case_of(config: PosteriorConfig, what: str) -> Case:
    """Return the evaluation of a posterior.

    Args:
        what: the name of the posterior in errors.
    Raises:
        ValueError: for a task without an evaluation.
    """
    problems = [problem for task, problem in CASES if task == config.task]
    if not problems:
        known = " or ".join(dict.fromkeys(task for task, _ in CASES))
        raise ValueError(f"{what} is a posterior for {config.task}, expected {known}: use hf_bayes.metrics")
    if "likelihood" in config.head:
        raise ValueError(
            f"{what} has the likelihood {config.head['likelihood'].get('name')}, whose labels this command does not "
            "read: load the model, and call evaluate of a BayesianTrainer or model.evaluate_batch"
        )
    return CASES[config.task, None if None in problems else _problem(config.head)]


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
