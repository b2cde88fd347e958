"""The reliability campaign: the injected faults, the record of a run, and the table in the docs.

A test of a row has the mark ``@pytest.mark.reliability("F6")``, its broken twin ``reliability("F6", twin=True)``.
``pytest -m reliability --reliability=FILE`` writes the counts to FILE.

python -m tests.faults.report    -> writes docs/reliability.json as a table into docs/reliability.md
"""

from __future__ import annotations

import datetime
import json
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from benchmarks.table import wrapped

DOCS = Path(__file__).parents[2] / "docs"
BEGIN, END = "<!-- table: make reliability -->\n", "<!-- end of table -->"


class Row(NamedTuple):
    """A possible failure, the faults that provoke it, the required outcome, and the smallest number of cases."""

    fear: str
    injected: str
    outcome: str
    required: int


ROWS = {
    "F1": Row(
        "a posterior is lost or half-written",
        "SIGKILL at random times of a save over an existing posterior, and before each of its system calls",
        "the complete old or the complete new one loads; the next save removes leftovers",
        200,
    ),
    "F2": Row(
        "the disk is full",
        "ENOSPC, EDQUOT, EFBIG, EIO at every write of a posterior; every other system call fails",
        "an error that names the path; the old posterior or checkpoint is intact",
        25,
    ),
    "F3": Row(
        "a file is damaged",
        "52 kinds: cut, flipped, zeroed, swapped, renamed, missing, doubled, and faults with mended hashes",
        "refused by name, or equal to what was saved; no crash, no hang",
        500,
    ),
    "F4": Row(
        "a resumed run differs",
        "resume at 10 random updates of several methods, with dropout; SIGKILL at random times of a run",
        "equal to the uninterrupted run bit for bit: state, generators, schedule, draws",
        50,
    ),
    "F5": Row(
        "a state file is missing at resume",
        "each file of a checkpoint removed, each of the chains' files damaged",
        "an error that names it; `resume_from_checkpoint=True` goes back to the last complete one",
        16,
    ),
    "F6": Row(
        "NaN goes unnoticed",
        "NaN and infinities in losses, gradients, weights, states, noise, learning rate, draws; bfloat16 overflow",
        "the run stops at that step, names chain and tensor, saves nothing of it",
        20,
    ),
    "F7": Row(
        "the base model is a different one",
        "other seed, depth, vocabulary, dtype, resized embeddings, edited tokenizer",
        "refused before any forward",
        6,
    ),
    "F8": Row(
        "a file is malicious",
        "pickles, code, links, paths and headers in posteriors and checkpoints",
        "nothing is run, nothing outside is read",
        40,
    ),
    "F9": Row(
        "memory runs out",
        "prediction with 64 members; address space limits while predicting, training and saving",
        "at most one model and one member more; the posterior still loads",
        10,
    ),
    "F10": Row(
        "a process of several is killed",
        "SIGKILL of one of two processes, in the middle of a step and of a save",
        "the other exits with an error within 120 s; a resumed run continues",
        10,
    ),
    "F11": Row(
        "the likelihood is scaled wrongly",
        "batch 4, 8, 16 x accumulation 1, 2, 4 x even and uneven data",
        "stationary variance within 5 % of the exact one",
        12,
    ),
    "F12": Row(
        "an argument of Trainer changes the target",
        "weight decay, clipping, optimizers and smoothing, at the start, and changed after it",
        "refused; the stationary variance stays exact",
        6,
    ),
    "F13": Row(
        "chains are not independent",
        "the noise of 4 chains of each sampler, across chains, seeds and lags; two chains with one stream",
        "cross-correlation below 4/sqrt(n); a shared stream is refused",
        4,
    ),
    "B30": Row(
        "a run continues from a checkpoint of another run",
        "resume with other chains, method, learning rate, schedule, length of data or run, batch, seed or subspace",
        "refused with a list of the settings, as saved and as given; nothing on disk is touched",
        8,
    ),
    "B31": Row(
        "a manifest leads out of its directory",
        "names with `..`, absolute and device paths, linked files and folders, in manifests whose hashes are right",
        "refused by name; nothing outside is read",
        20,
    ),
}


class Tally(NamedTuple):
    """The counts of the tests of a row."""

    injected: int = 0
    reached: int = 0
    twins: int = 0
    twins_caught: int = 0
    seconds: float = 0.0

    def add(self, **more: float) -> Tally:
        return self._replace(**{name: getattr(self, name) + value for name, value in more.items()})


class Campaign:
    """A pytest plugin that adds up the counts of the marked tests. With xdist it runs in the controller."""

    def __init__(self, file: Path | None) -> None:
        self.file = file
        self.tallies: dict[str, Tally] = {}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            for mark in item.iter_markers("reliability"):
                item.user_properties.append(("reliability", [mark.args[0], bool(mark.kwargs.get("twin"))]))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        properties = dict(report.user_properties)
        row, twin = properties.get("reliability", (None, False))
        if row is None:
            return
        tally = self.tallies.get(row, Tally()).add(seconds=report.duration)
        if report.when == "call" and twin:
            tally = tally.add(twins=1, twins_caught=int(report.passed))
        elif report.when == "call":
            cases = int(properties.get("injected", 1))
            tally = tally.add(injected=cases, reached=cases if report.passed else 0)
        self.tallies[row] = tally

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.file is None or session.config.option.collectonly or hasattr(session.config, "workerinput"):
            return  # a list of tests is not a campaign, and would empty the record
        rows = {
            name: {**tally._asdict(), "seconds": round(tally.seconds, 1)}
            for name, tally in sorted(self.tallies.items(), key=lambda item: list(ROWS).index(item[0]))
        }
        self.file.write_text(json.dumps({**circumstances(), "rows": rows}, indent=2) + "\n")
        if shortfalls(rows):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def circumstances() -> dict[str, Any]:
    """Return the date and the machine of the campaign."""
    import peft  # here, because conftest.py imports this file
    import safetensors
    import torch
    import transformers

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    names = [line.split(":")[1] for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": f"{len(os.sched_getaffinity(0))} cores ({(names or [platform.machine()])[0].strip()}), "
        f"{memory:.0f} GiB, {platform.system()}",
        "versions": {
            "python": platform.python_version(),
            **{module.__name__: module.__version__ for module in (torch, transformers, peft, safetensors)},
        },
    }


def _lines(file: str) -> Iterator[str]:
    with open(file) as lines:
        yield from lines


def shortfalls(rows: dict[str, Any]) -> list[str]:
    """Return messages about the targets that a campaign did not reach."""
    found = [f"{name} was not run" for name in ROWS if name not in rows]
    for name, row in rows.items():
        if row["reached"] < row["injected"] or row["twins_caught"] < row["twins"]:
            twins = f"{row['twins_caught']} of {row['twins']} broken twins"
            found.append(f"{name} reached {row['reached']} of {row['injected']}, {twins}")
        if row["injected"] < ROWS[name].required:
            found.append(f"{name} tried {row['injected']} cases, {ROWS[name].required} are required")
    return found


def table(results: dict[str, Any]) -> str:
    """Return the Markdown table."""
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    lines = [
        f"Measured {results['date']} on {results['machine']}; {versions}.",
        "",
        "| | failure | what the tests do | required | result | s |",
        "|---|---|---|---|---|---|",
    ]
    for name, found in results["rows"].items():
        row = ROWS[name]
        twins = f"; broken twins caught: {found['twins_caught']} of {found['twins']}" if found["twins"] else ""
        lines.append(
            f"| {name} | {row.fear} | {row.injected} | {row.outcome}: in all of at least {row.required} trials | "
            f"{found['reached']} of {found['injected']}{twins} | {found['seconds']:.0f} |"
        )
    return "\n".join(lines) + "\n"


def rendered(document: str, results: dict[str, Any]) -> str:
    """Return the document with the table between its markers."""
    head, rest = document.split(BEGIN)
    return head + BEGIN + wrapped(table(results)) + END + rest.split(END)[1]


def main() -> None:
    document = DOCS / "reliability.md"
    results = json.loads((DOCS / "reliability.json").read_text())
    document.write_text(rendered(document.read_text(), results))


if __name__ == "__main__":
    main()
