from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_module_runs_the_command() -> None:
    command = [sys.executable, "-m", "hf_bayes.cli"]
    done = subprocess.run([*command, "diagnose", "nowhere"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("hf-bayes diagnose: ")
    assert done.stderr.count("\n") == 1  # no traceback, and no message of a library
