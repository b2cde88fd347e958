"""The quickstart, with very little of everything."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "quickstart.py"
SIZES = ["--updates", "2", "--base_epochs", "0.01", "--test_windows", "2", "--validation_windows", "8"]
ROWS = ["plain", "plain, with t", "plain, 4 x longer", "deep ensemble of 4", "nothing set"]


def test_a_run_prints_a_table_and_at_most_25_other_lines(tmp_path: Path) -> None:
    run = subprocess.run([sys.executable, SCRIPT, *SIZES, "--output_dir", tmp_path], capture_output=True, check=True)
    lines, messages = run.stdout.decode().split("\n"), run.stderr.decode()
    rows = [line for line in lines if line.startswith("│")]
    assert [row.split("│")[1].strip() for row in rows] == ROWS
    shown = [line.split("\r")[-1].strip() for line in [*lines, *messages.split("\n")]]  # a bar writes over itself
    others = [line for line in shown if line and line[0] not in "┏┃┡│└"]
    assert len(others) <= 25, "\n".join(others)
    assert "Warning" not in messages
    assert (
        "With nothing set, the run has chosen ensemble" in run.stdout.decode()
    )  # two updates are too few for a sampler
    assert "<span" in (tmp_path / "generated.html").read_text()
    assert (tmp_path / "nothing-set" / "evaluation" / "uncertainty.png").stat().st_size > 10_000
    for name in ("plain", "plain-4-x-longer", "deep-ensemble-of-4", "nothing-set"):
        assert (tmp_path / name / "manifest.json").exists()
