"""``make mutants``: plant every fault of ``tests.mutants.faults`` in a copy of the package and see its tests fail.

python -m tests.mutants.run                all faults; writes docs/mutants.json and the table of docs/mutants.md
python -m tests.mutants.run sghmc: folding faults whose names hold one of these words; writes nothing
"""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from benchmarks.table import replaced
from tests.faults.report import circumstances
from tests.mutants.fault import ROOT, Fault
from tests.mutants.faults import FAULTS

RECORD, PAGE = ROOT / "docs" / "mutants.json", ROOT / "docs" / "mutants.md"
HEAVY = ("torch", "numpy", "scipy.stats", "sklearn", "arviz", "datasets", "transformers", "peft", "accelerate")
"""Imported once, before the processes that test a fault each are forked."""


class Outcome(NamedTuple):
    """The result of a pytest run: tests that failed in their own code, tests that passed, and other errors."""

    failed: list[str]
    passed: list[str]
    errors: list[str]
    seconds: float

    def survived(self, tests: Iterable[str]) -> list[str]:
        """Return the ``tests`` of which no case has failed."""
        return [test for test in tests if not any(covers(test, node) for node in self.failed)]


class Watcher:
    """A pytest plugin that keeps what became of each test."""

    def __init__(self) -> None:
        self.failed: list[str] = []
        self.passed: list[str] = []
        self.errors: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid.removeprefix("tests/")
        if report.when == "call":
            (self.failed if report.failed else self.passed).append(name)
        elif report.failed:
            self.errors.append(f"{name}: {report.longreprtext}")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.errors.append(f"{report.nodeid}: {report.longrepr}")


def covers(test: str, node: str) -> bool:
    """Return whether a node is the test, or one of its cases."""
    return node == test or node.startswith(f"{test}[")


def try_out(tests: tuple[str, ...], fault: Fault | None = None) -> Outcome:
    """Run tests on a copy of the package in a folder of its own, first on the path; in a process that ends with it."""
    start, watcher = time.perf_counter(), Watcher()
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "hf_bayes"
        shutil.copytree(ROOT / "hf_bayes", package)  # with __pycache__: files keep their times, all but one
        if fault is not None:
            file = package / fault.file
            file.write_text(fault.planted(file.read_text()))
        sys.path.insert(0, folder)
        os.environ["PYTHONPATH"] = os.pathsep.join([folder, str(ROOT)])
        options = [*("-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", ""), "-o", f"pythonpath={folder}"]
        with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
            code = pytest.main([*options, "--rootdir", str(ROOT), *(f"tests/{t}" for t in tests)], plugins=[watcher])
        if code == pytest.ExitCode.USAGE_ERROR:
            watcher.errors.append(f"pytest does not find all of {', '.join(tests)}")
        if Path(importlib.import_module("hf_bayes").__file__ or "").parent != package:
            watcher.errors.append("the tests imported another package than the copy")
    return Outcome(watcher.failed, watcher.passed, watcher.errors, time.perf_counter() - start)


def main(words: list[str]) -> int:
    """Number of faults that survived, or 1 where the tests fail on the package as it is."""
    os.chdir(ROOT)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for module in HEAVY:
        importlib.import_module(module)
    faults = [fault for fault in FAULTS if not words or any(word in fault.name for word in words)]
    if not faults:  # pytest without tests would run all of them
        raise SystemExit(f"no fault has {' or '.join(map(repr, words))} in its name: see docs/mutants.md")
    for fault in faults:  # a text that is gone stops the run before it begins
        fault.planted((ROOT / "hf_bayes" / fault.file).read_text())
    every = tuple(dict.fromkeys(test for fault in faults for test in fault.tests))
    console = Console()
    with multiprocessing.get_context("fork").Pool(2, maxtasksperchild=1) as pool:
        sound = pool.apply_async(try_out, (every,))
        runs = [pool.apply_async(try_out, (fault.tests, fault)) for fault in faults]
        rows = []
        for fault, run in zip(faults, runs, strict=True):
            outcome = run.get()
            rows.append(row(fault, outcome))
            console.print(f"{'SURVIVED' if rows[-1]['survived'] else 'caught  '} {fault.name}", highlight=False)
        whole = sound.get()
    console.print(shown(rows))
    if whole.failed or whole.errors:
        console.print(Text("\n".join(["the tests fail on the package as it is:", *whole.failed, *whole.errors])))
        return 1
    survivors = [found["fault"] for found in rows if found["survived"]]
    console.print(f"{len(rows)} faults, {len(survivors)} survived", *survivors, sep="\n")
    if not words and not survivors:
        RECORD.write_text(json.dumps({**circumstances(), "faults": rows}, indent=1) + "\n")
        PAGE.write_text(replaced(PAGE.read_text(), "mutants", markdown(json.loads(RECORD.read_text()))))
    return len(survivors)


def row(fault: Fault, outcome: Outcome) -> dict[str, Any]:
    """Return the outcome of a fault, JSON-ready."""
    return {
        "fault": fault.name,
        "file": fault.file,
        "tests": list(fault.tests),
        "survived": [*outcome.survived(fault.tests), *outcome.errors],
        "seconds": round(outcome.seconds, 1),
    }


def shown(rows: list[dict[str, Any]]) -> Table:
    """Return the table for the terminal."""
    table = Table("fault", "in", Column("caught by", overflow="fold"), "s", title="planted faults")
    for found in rows:
        tests = Text("\n".join(found["tests"]))  # as it is: their brackets are no markup
        outcome = Text("\n".join(["SURVIVED", *found["survived"]]), style="red") if found["survived"] else tests
        table.add_row(found["fault"], found["file"], outcome, f"{found['seconds']:.1f}")
    return table


def markdown(record: dict[str, Any]) -> str:
    """Return the table for the page."""
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    seconds = sum(found["seconds"] for found in record["faults"])
    lines = [
        f"{len(record['faults'])} faults, {sum(bool(found['survived']) for found in record['faults'])} survivors. "
        f"{record['date']}, {record['machine']}; {versions}. {seconds:.0f} s, two at a time.",
        "",
        "| fault | in | caught by | s |",
        "|---|---|---|---|",
    ]
    for found in record["faults"]:
        tests = ", ".join(f"`{test}`" for test in found["tests"])
        lines.append(f"| {found['fault']} | `{found['file']}` | {tests} | {found['seconds']:.1f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
