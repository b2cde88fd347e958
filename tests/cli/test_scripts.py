from __future__ import annotations

from pathlib import Path

import pytest
from transformers import TrainingArguments

from hf_bayes.cli.arguments import parse_arguments
from hf_bayes.cli.scripts import train_and_save


class Recorder:
    """A substitute for a trainer, which records the arguments of ``train``."""

    eval_dataset: tuple[object, ...] = ()

    def __init__(self, args: TrainingArguments) -> None:
        self.args = args
        self.asked: list[object] = []

    def train(self, resume_from_checkpoint: object) -> None:
        self.asked.append(resume_from_checkpoint)

    def evaluate(self) -> dict[str, float]:
        return {}

    def save_model(self, *_: object) -> None: ...

    log_metrics = save_metrics = save_model


@pytest.mark.parametrize(
    ("text", "meant"),
    [("true", True), ("True", True), ("false", None), (None, None), ("out/checkpoint-4", "out/checkpoint-4")],
)
@pytest.mark.parametrize("source", ["flags", "file"])
def test_scripts_can_ask_for_the_newest_checkpoint(
    tmp_path: Path, source: str, text: str | None, meant: object
) -> None:
    given = [] if text is None else ["--resume_from_checkpoint", text]
    if source == "file":
        line = "" if text is None else f"resume_from_checkpoint: {text}\n"
        (tmp_path / "run.yaml").write_text(f"output_dir: {tmp_path}\n{line}")
        given = ["--config", str(tmp_path / "run.yaml")]
    (args,) = parse_arguments(TrainingArguments, arguments=[*given, "--output_dir", str(tmp_path)])
    recorder = Recorder(args)
    train_and_save(recorder)  # type: ignore[arg-type]
    assert recorder.asked == [meant]
