from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Literal

import pytest

from hf_bayes.cli.command import Command
from hf_bayes.cli.help import COMMON, OWN, help_text
from hf_bayes.cli.main import COMMANDS
from hf_bayes.training.checks.arguments import REFUSED


def command_of(name: str) -> Command:
    found: Command = importlib.import_module(f"hf_bayes.cli.commands.{name}").COMMAND
    return found


def names_in(text: str) -> set[str]:
    return {line.split()[0] for line in text.splitlines() if line.startswith("  --")}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_fits_on_two_screens(name: str) -> None:
    lines = help_text(name, command_of(name)).splitlines()
    assert len(lines) <= 80
    assert max(map(len, lines)) <= 120


@pytest.mark.parametrize("everything", [False, True])
@pytest.mark.parametrize("name", ["train", "tune", "continual"])
def test_refused_arguments_are_not_listed(name: str, everything: bool) -> None:
    shown = names_in(help_text(name, command_of(name), everything=everything))
    assert not shown & {f"--{refused}" for refused in REFUSED}
    unused = {f"--{each}" for each in command_of(name).unused}
    assert {f"--{each}" for each in (*COMMON, *OWN)} - unused <= shown
    assert not shown & unused


def test_the_help_of_a_comparison_has_no_rate_and_no_checkpoint() -> None:
    shown = names_in(help_text("tune", command_of("tune"), everything=True))
    assert not shown & {"--learning_rate", "--eval_strategy", "--save_strategy", "--resume_from_checkpoint"}
    assert {"--push_to_hub", "--hub_model_id"} <= shown
    assert not names_in(help_text("continual", command_of("continual"))) & {"--push_to_hub", "--hub_model_id"}


def test_all_arguments_are_listed_on_request() -> None:
    short, whole = (names_in(help_text("train", command_of("train"), everything=each)) for each in (False, True))
    assert short < whole
    assert "--dataloader_num_workers" in whole - short


@dataclass
class Example:
    """An example."""

    _argument_group_name = "example"

    name: str = field(metadata={"help": "Its name. " + "More words. " * 10})
    size: int | None = field(default=None, metadata={"help": "Its size. Default: as it comes."})
    kind: Literal["a", "b"] = field(default="a", metadata={"help": "Its kind."})
    parts: list[int] = field(default_factory=list, metadata={"help": "Its parts."})
    fields: dict | str | None = field(default=None, metadata={"help": "Its fields: 5 %% of them."})


def work(example: Example) -> None:
    """Work on an example,
    and end.

    Not shown.
    """


def test_an_argument_has_values_words_and_a_default() -> None:
    text = help_text("work", Command(work, (Example,), "work x", first="name"))
    assert "usage: hf-bayes work [NAME | FILE] [--NAME VALUE ...]" in text
    assert "Work on an example, and end." in text
    assert "Not shown" not in text
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "--size N Its size. Default: as it comes." in lines
    assert "--kind a|b Its kind. [a]" in lines
    assert "--parts N ... Its parts." in lines
    assert "--fields JSON Its fields: 5 % of them." in lines
    (name,) = [line for line in lines if line.startswith("--name")]
    assert name.startswith("--name TEXT Its name. More words.")
    assert name.endswith("(required)")
