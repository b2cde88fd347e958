"""Run the tutorials of the documentation, and record what their cells print in ``docs/tutorials/outputs.json``.

    python scripts/run_tutorials.py [NAME ...]

A tutorial is a notebook in jupytext's percent format. All tutorials run in one temporary folder, because the second one
uses the posterior of the first one. The site shows the recorded text below each cell.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import io
import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parents[1] / "docs" / "tutorials"
OUTPUTS = FOLDER / "outputs.json"
NAMES = ("first_posterior", "generate", "abstain")
NEEDS = {"generate": "first_posterior"}
"""The tutorial whose files another one reads."""

LOGGED = ("{'train_runtime'", "{'eval_loss'")
"""The beginnings of the lines that transformers' Trainer prints."""


class Cell(NamedTuple):
    """A part of a notebook: Markdown text, or code."""

    is_code: bool
    text: str


def cells_of(source: str) -> list[Cell]:
    """Return the cells of a notebook in the percent format."""
    import jupytext  # the site needs it, too; the package does not

    cells = jupytext.reads(source, fmt="py:percent").cells
    return [Cell(cell.cell_type == "code", cell.source) for cell in cells]


def fingerprint(code: str) -> str:
    """Return a short name of a cell's code, by which an output that is out of date is found.

    Comments and line breaks do not count.
    """
    return hashlib.sha256(ast.unparse(ast.parse(code)).encode()).hexdigest()[:12]


def outputs_of(name: str) -> Iterator[dict[str, str]]:
    """Run the code of a tutorial in the current folder, and yield what each cell prints."""
    names: dict[str, object] = {}
    for number, cell in enumerate(cells_of((FOLDER / f"{name}.py").read_text("utf-8"))):
        if cell.is_code:
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(cell.text, f"{name}, cell {number}", "exec"), names)
            lines = [line for line in printed.getvalue().splitlines() if not line.startswith(LOGGED)]
            yield {"code": fingerprint(cell.text), "printed": "\n".join(lines)}


def main(names: list[str]) -> None:
    """Run tutorials, by default all, and write their outputs."""
    wanted = [name for name in NAMES if not names or name in names or name in {NEEDS.get(each) for each in names}]
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tiny runs deserve their warnings
        for name in wanted:
            begin, begin_cpu = time.perf_counter(), time.process_time()
            found = list(outputs_of(name))
            recorded = json.loads(OUTPUTS.read_text("utf-8")) if OUTPUTS.exists() else {}
            recorded[name] = found
            OUTPUTS.write_text(json.dumps(recorded, indent=1, ensure_ascii=False, sort_keys=True) + "\n", "utf-8")
            cpu = time.process_time() - begin_cpu
            print(f"{name}: {time.perf_counter() - begin:.0f} s, {cpu:.0f} s of CPU", file=sys.stderr)


if __name__ == "__main__":
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    # with more threads, last digits depend on their number, and threads that wait on a busy machine use CPU time
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(sys.argv[1:])
