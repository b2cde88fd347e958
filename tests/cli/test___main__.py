from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_module_runs_the_command() -> None:
    command = [sys.executable, "-m", "hf_bayes.cli"]
    done = subprocess.run([*command, "diagnose", "nowhere"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("hf-bayes diagnose: ")
    assert done.stderr.count("\n") == 1  # no traceback, and no message of a library


@pytest.mark.parametrize("place", ["hf_bayes.cli.quiet", "hf_bayes.cli.commands.diagnose"])
def test_an_interrupt_during_the_imports_is_silent(place: str) -> None:
    program = f"""
import sys
import tomllib
class Finder:
    def find_spec(self, name, *_):
        if name == "{place}":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Finder())
from hf_bayes.cli.__main__ import run
sys.exit(run())
"""
    command = [sys.executable, "-c", program, "diagnose", "nowhere"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_the_console_command_is_this_module() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"hf-bayes": "hf_bayes.cli.__main__:run"}
