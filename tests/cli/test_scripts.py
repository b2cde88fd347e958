from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from transformers import TrainingArguments

from hf_bayes.cli.arguments import MethodArguments
from hf_bayes.cli.parsing import parse_arguments
from hf_bayes.cli.scripts import continuing_comparison, continuing_training, resume_point
from hf_bayes.methods.averaging.map import MAPConfig
from hf_bayes.training.arguments import BayesianTrainingArguments
from tests import runs


@pytest.mark.parametrize(
    ("text", "meant"),
    [("true", True), ("True", True), ("false", None), (None, None), ("out/checkpoint-4", "out/checkpoint-4")],
)
@pytest.mark.parametrize("source", ["flags", "file"])
def test_a_run_can_resume_from_the_newest_checkpoint(
    tmp_path: Path, source: str, text: str | None, meant: object
) -> None:
    given = [] if text is None else ["--resume_from_checkpoint", text]
    if source == "file":
        line = "" if text is None else f"resume_from_checkpoint: {text}\n"
        (tmp_path / "run.yaml").write_text(f"output_dir: {tmp_path}\n{line}")
        given = ["--config", str(tmp_path / "run.yaml")]
    (args,) = parse_arguments(TrainingArguments, arguments=[*given, "--output_dir", str(tmp_path)])
    assert resume_point(args.resume_from_checkpoint) == meant


def test_an_interrupted_training_continues_from_its_checkpoint(tmp_path: Path) -> None:
    trainer = runs.trainer(tmp_path, MAPConfig(), max_steps=2, map_updates=0, save_strategy="steps", save_steps=1)
    before = continuing_training(None, MethodArguments(), None, trainer.args)
    assert before.startswith(f"{tmp_path} holds no checkpoint: the same command begins anew")
    trainer.train()
    after = continuing_training(None, MethodArguments(), None, trainer.args)
    assert f"--resume_from_checkpoint true continues it at {tmp_path / 'checkpoint-2'}" in after
    assert continuing_training(None, MethodArguments(method="auto"), None, trainer.args) == continuing_comparison()


@pytest.mark.parametrize("name", ["train", "classify", "tune", "continual"])
def test_every_training_command_says_how_to_continue(name: str) -> None:
    command = importlib.import_module(f"hf_bayes.cli.commands.{name}").COMMAND
    chosen = command.arguments.index(MethodArguments) if MethodArguments in command.arguments else 1
    assert chosen == 1  # as continuing_training takes them
    assert command.arguments[-1] is BayesianTrainingArguments
    assert command.continuing in (continuing_training, continuing_comparison)
