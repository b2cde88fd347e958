"""The campaign's record and the page that shows it."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from typing import Any

import pytest

from tests.faults.report import DOCS, ROWS, rendered, shortfalls

DOCUMENT = (DOCS / "reliability.md").read_text()
ROOT = DOCS.parent
MAKEFILE = (ROOT / "Makefile").read_text()
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
RESULTS: dict[str, Any] = json.loads((DOCS / "reliability.json").read_text())


def test_the_page_shows_the_record() -> None:
    assert rendered(DOCUMENT, RESULTS) == DOCUMENT


def test_every_campaign_row_was_run_and_reached_its_number() -> None:
    assert list(RESULTS["rows"]) == list(ROWS) == [*(f"F{number}" for number in range(1, 14)), "B30", "B31"]
    assert shortfalls(RESULTS["rows"]) == []
    assert set(re.findall(r"^\| ([BF]\d+) \|", DOCUMENT, flags=re.MULTILINE)) == set(ROWS)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"reached": 19}, "F6 reached 19 of"),
        ({"injected": 19, "reached": 19}, "F6 tried 19 cases, 20 are required"),
        ({"twins": 2, "twins_caught": 1}, "1 of 2 broken twins"),
    ],
)
def test_a_row_that_falls_short_is_told(change: dict[str, int], words: str) -> None:
    rows = {**RESULTS["rows"], "F6": {**RESULTS["rows"]["F6"], **change}}
    (problem,) = shortfalls(rows)
    assert words in problem
    assert rendered(DOCUMENT, {**RESULTS, "rows": rows}) != DOCUMENT
    del rows["F6"]
    assert shortfalls(rows) == ["F6 was not run"]


def commands(target: str) -> list[list[str]]:
    """Words of the lines of the Makefile that run a module for ``target``, from the module on."""
    recipe = re.search(rf"^{target}: .*\n((?:\t.*\n)+)", MAKEFILE, flags=re.MULTILINE)
    assert recipe is not None
    lines = (line.strip().replace("$(WORKERS)", "2") for line in recipe[1].splitlines())
    return [shlex.split(line)[2:] for line in lines if re.match(r"\S+/python -m ", line)]


def collected(words: list[str]) -> list[str]:
    """Tests that pytest, called with these words, finds in one file of the campaign."""
    # testpaths, not an argument: before a named path is found the options of conftest.py are not known there, either
    one_file = ["-o", "testpaths=tests/processes/test_killed_rank.py", "--collect-only", "-q"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", *words, *one_file], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode in (0, 4), done.stdout + done.stderr  # 4: pytest does not understand the words
    return [line for line in done.stdout.splitlines() if "::" in line]


def test_make_reliability_finds_its_tests_and_keeps_the_record() -> None:
    before = (DOCS / "reliability.json").read_bytes()
    (pytest_line, report_line) = commands("reliability")
    assert len(collected(pytest_line)) == 1
    assert (DOCS / "reliability.json").read_bytes() == before
    assert report_line == ["tests.faults.report"]
    # the twin: pytest takes the value for a test file if it is a word of its own and the option is not yet registered
    apart = [part for word in pytest_line for part in (word.split("=") if "--reliability" in word else [word])]
    assert collected(apart) == []


@pytest.mark.parametrize("target", ["test-slow", "reliability"])
def test_marks_that_the_makefile_chooses_are_declared_and_worn(target: str) -> None:
    (words,) = (words for words in commands(target) if words[0] == "pytest" and "-m" in words)
    chosen = set(words[words.index("-m") + 1].split()) - {"or", "and", "not"}
    declared = {re.split(r"\W", line)[0] for line in PYPROJECT["tool"]["pytest"]["ini_options"]["markers"]}
    assert chosen <= declared
    tests = "".join(file.read_text() for file in (ROOT / "tests").rglob("test_*.py"))
    assert all(f"@pytest.mark.{mark}" in tests for mark in chosen)


def test_modules_that_the_makefile_runs_are_there() -> None:
    modules = re.findall(r"python -m ([\w.]+)", MAKEFILE)
    assert {"pytest", "tests.faults.report", "tests.mutants.run", "benchmarks"} <= set(modules)
    assert all(importlib.util.find_spec(module) for module in modules)
