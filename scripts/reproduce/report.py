"""The page of an experiment: docs/results/NAME.json, .md and .png, made by scripts/reproduce/NAME.py.

The text of a page is written by hand. Its tables stand between markers and are made from the JSON. A module here has

    blocks(record) -> dict[str, str]        marker -> table
    figures(record, directory) -> None      PNG files named NAME.png or NAME_*.png (optional)

and ends in ``keep(NAME, ...)`` or ``continued(NAME, ...)``. ``python -m scripts.reproduce.report`` makes the tables and
figures of all pages again.
"""

from __future__ import annotations

import importlib
import json
import math
import re
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from transformers.utils import logging

from benchmarks.harness import machine
from benchmarks.table import replaced
from hf_bayes.cli.parsing import parse_arguments
from hf_bayes.core.types import RowScores
from hf_bayes.diagnostics.comparison import difference_std_error

RESULTS = Path(__file__).parents[2] / "docs" / "results"


def keep(name: str, run: Callable[[], Mapping[str, Any]], directory: Path = RESULTS) -> None:
    """Run an experiment, keep its record with a description of the machine, and update its page."""
    start = time.perf_counter()
    found = run()
    # a continued experiment records the seconds of all its runs
    record = {"seconds": round(time.perf_counter() - start), **found, "machine": machine("cpu")}
    (directory / f"{name}.json").write_text(as_text(record))
    render(name, directory)


def continued(name: str, arguments: type, experiment: Callable[[Any, Path], Mapping[str, Any]]) -> None:
    """Run the command of an experiment that can be continued: quietly, on one core.

    Args:
        name: of the page.
        arguments: the dataclass of the command's arguments.
        experiment: (arguments, file of the record) -> the record after the missing runs.
    """
    (found,) = parse_arguments(arguments)
    logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    keep(name, lambda: experiment(found, RESULTS / f"{name}.json"))


def as_text(record: Mapping[str, Any]) -> str:
    """Return a record as JSON with a line for each entry, and one line for a list of numbers."""
    spread_out = json.dumps(record, indent=1) + "\n"
    return re.sub(r"\[[^\[\]{}\"]*\]", lambda found: " ".join(found.group().split()), spread_out)


def render(name: str, directory: Path = RESULTS) -> None:
    """Make the tables and figures of a page from its record."""
    experiment = importlib.import_module(f"scripts.reproduce.{name}")
    record = json.loads((directory / f"{name}.json").read_text())
    if hasattr(experiment, "figures"):
        experiment.figures(record, directory)
    page = directory / f"{name}.md"
    page.write_text(tables(name, record, page.read_text()))


def tables(name: str, record: Mapping[str, Any], page: str) -> str:
    """Return the page with its tables made from ``record``.

    Raises:
        ValueError: if the page has lost the markers of a table.
    """
    blocks = importlib.import_module(f"scripts.reproduce.{name}").blocks(record)
    for marker, block in {**blocks, "circumstances": circumstances(record)}.items():
        page = replaced(page, marker, block)
    return page


def circumstances(record: Mapping[str, Any]) -> str:
    """Return the machine of a record and the duration of the run."""
    about = record["machine"]
    versions = ", ".join(f"{name} {about[name]}" for name in ("python", "torch", "transformers", "peft", "hf_bayes"))
    return f"{record['seconds']} s on {about['processor']}, threads: {about['threads']}; {versions}."


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table. Floats have three digits. Pass texts for another format."""
    lines = [columns, ["---"] * len(columns), *([_cell(value) for value in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Return mean and standard deviation over seeds, as ``0.123 ± 0.004``."""
    mean = f"{statistics.fmean(values):.{digits}f}"
    alone = len(values) == 1 or not all(map(math.isfinite, values))  # an infinite R-hat has no spread
    return mean if alone else f"{mean} ± {statistics.stdev(values):.{digits}f}"


def paired_difference(first: ArrayLike, second: ArrayLike) -> str:
    """Return the mean of ``first - second`` with its standard error over rows, as ``+0.123 ± 0.004``.

    Args:
        first: [R] a score of each test row, such as its NLL.
        second: [R] the same of another prediction.
    """
    ours, theirs = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    ones = np.ones(len(ours), dtype=np.int64)
    error = difference_std_error(RowScores(ours, ones), RowScores(theirs, ones))
    return f"{ours.mean() - theirs.mean():+.3f} ± {math.nan if error is None else error:.3f}"


def legend_once(axis: Any) -> None:
    """Draw a legend that shows each label once."""
    handles, labels = axis.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    axis.legend(unique.values(), unique.keys(), frameon=False)


def _cell(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    for kept in sorted(RESULTS.glob("*.json")):
        render(kept.stem)
