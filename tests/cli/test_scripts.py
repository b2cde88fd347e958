from __future__ import annotations

from pathlib import Path

import pytest
from transformers import TrainingArguments

from hf_bayes.cli.parsing import parse_arguments
from hf_bayes.cli.scripts import resume_point


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
