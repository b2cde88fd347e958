"""The training arguments of a tuning: none is ignored in silence."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from hf_bayes.training.tuning.arguments import REASONS, UNUSED, check_arguments, repository
from tests.training.tuning.tuned import arguments


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"learning_rate": 0.1}, "learning_rate=0.1 would be ignored: each method has its own rate"),
        ({"eval_strategy": "steps", "eval_steps": 1}, "eval_strategy=steps would be ignored: each trial is evaluated"),
        ({"save_strategy": "epoch"}, "save_strategy=epoch would be ignored: each trial is kept as soon as"),
        ({"resume_from_checkpoint": "nowhere"}, "resume_from_checkpoint=nowhere would be ignored: the same call"),
        ({"report_to": ["tensorboard"]}, "report_to=['tensorboard'] would be ignored: trials report to no tracker"),
        ({"map_updates": 3}, "map_updates=3 would be ignored: plain fine-tuning"),
        ({"push_to_hub": True, "hub_strategy": "every_save"}, "hub_strategy='every_save' would push unfinished"),
        ({"push_to_hub": True, "hub_model_id": "a b"}, "upload to 'a b', which is no id of a repository: set hub_mod"),
    ],
)
def test_an_argument_that_no_trial_uses_is_refused(tmp_path: Path, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        check_arguments(arguments(tmp_path, **settings), 200)


@pytest.mark.parametrize(
    "settings",
    [
        {"save_strategy": "steps"},  # the default
        {"save_strategy": "no", "eval_strategy": "no", "report_to": "none", "map_updates": 0},
        {"resume_from_checkpoint": "false", "hub_model_id": "a b"},
        {"push_to_hub": True, "hub_model_id": "user/name"},
    ],
)
def test_values_that_ask_for_nothing_are_taken(tmp_path: Path, settings: dict[str, Any]) -> None:
    check_arguments(arguments(tmp_path, **settings), 200)


def test_the_repository_is_that_of_a_trainer(tmp_path: Path) -> None:
    assert repository(arguments(tmp_path / "mine")) == "mine"
    assert repository(arguments(tmp_path / "mine", hub_model_id="user/x")) == "user/x"


def test_no_help_lists_what_is_refused() -> None:
    assert REASONS.keys() < UNUSED
