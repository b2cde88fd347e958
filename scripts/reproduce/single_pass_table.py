"""Single passes on real text with three seeds: scores and costs beside the mean network, 8 and 32 members, a student.

    python -m scripts.reproduce.single_pass_table --data DATA --work out   # the figures that the record lacks
    python -m scripts.reproduce.single_pass_table --data DATA --work out --tasks clinc --kinds SWAG --seeds 1

The tasks are those of ``recommend``, with LoRA in the last two blocks of the encoder. No test row is used before the
scores: some held-out rows choose the prior of a Laplace approximation, and other held-out rows fit temperatures and
factors. A later call makes only missing predictions, and finds the posteriors in the folder ``--work`` again.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from scripts.reproduce.recommend_tasks import Task, clinc, debian
from scripts.reproduce.report import as_text, continued, spread, table
from scripts.reproduce.single_pass_table_cells import KINDS, WAYS, Cell, costs
from scripts.reproduce.single_pass_table_scores import scores

NAME = "single_pass_table"
BLOCKS = [4, 5]
"""The last two of the encoder's six blocks."""

TASKS = {"debian": debian, "debian, 800 updates": debian, "clinc": clinc, "clinc, 800 updates": clinc}
RIVALS = ("mean network", "single pass")
"""The predictions whose NLL or AURC is subtracted."""


@dataclass
class Arguments:
    """The part of the table to make."""

    data: str = field(metadata={"help": "Folder with clinc150/data_full.json and tinyshakespeare/input.txt."})
    work: str = field(default="single-pass-table", metadata={"help": "Folder that keeps posteriors for later calls."})
    tasks: list[str] = field(default_factory=lambda: list(TASKS), metadata={"help": "Their names."})
    kinds: list[str] = field(default_factory=lambda: list(KINDS), metadata={"help": "The posteriors."})
    ways: list[str] = field(default_factory=list, metadata={"help": "The predictions. Default: all."})
    seeds: int = field(default=3, metadata={"help": "Number of seeds."})
    minutes: float = field(default=math.inf, metadata={"help": "No prediction begins after this time."})


def experiment(args: Arguments, path: Path) -> dict[str, Any]:
    """Return the record after the missing predictions, each of which is saved when it is there."""
    record: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"cells": {}}
    begin = time.perf_counter()
    tasks: dict[str, Task] = {}
    for kind in args.kinds:
        for seed in range(args.seeds):
            for name in args.tasks:
                tasks[name] = tasks.get(name) or TASKS[name](Path(args.data), BLOCKS)
                label = f"{name}, {kind}, {seed}"
                found = record["cells"].setdefault(label, {"task": name, "kind": kind, "seed": seed, "ways": {}})
                first = Cell(tasks[name], kind, 0, Path(args.work), f"{name}, {kind}, 0") if seed else None
                cell = Cell(tasks[name], kind, seed, Path(args.work), label, first)
                for names, make in WAYS.items():
                    late = time.perf_counter() - begin > 60 * args.minutes
                    if late or set(names) <= set(found["ways"]) or (args.ways and not set(names) & set(args.ways)):
                        continue
                    spent = time.process_time()
                    own = make(cell)
                    found["ways"] |= {way: scores(sets, cell.labels) for way, sets in own.items()}
                    found["verdict"] = cell.posterior.config.diagnostics.get("verdict")
                    found["seconds"] = round(found.get("seconds", 0) + time.process_time() - spent)
                    path.write_text(as_text(record))
                    shown = {way: {k: v for k, v in found["ways"][way].items() if "resampled" not in k} for way in own}
                    print(label, found["seconds"], shown, flush=True)
                if seed == 0 and "costs" not in found and time.perf_counter() - begin < 60 * args.minutes:
                    found["costs"] = costs(cell)
                    path.write_text(as_text(record))
                    print(label, found["costs"], flush=True)
    return record | {"seconds": sum(cell.get("seconds", 0) for cell in record["cells"].values())}


def blocks(record: Mapping[str, Any]) -> dict[str, str]:
    """Return a table for each task that has predictions."""
    cells = [cell for cell in record["cells"].values() if cell["ways"]]
    tasks = dict.fromkeys(cell["task"] for cell in cells)
    return {task: _table([cell for cell in cells if cell["task"] == task]) for task in tasks}


def _table(cells: Sequence[Mapping[str, Any]]) -> str:
    rows, shifts = [], list(next(iter(cells[0]["ways"].values()))["auroc"])
    for kind in KINDS:
        own = [cell for cell in cells if cell["kind"] == kind]
        for way in (name for names in WAYS for name in names):
            found = [cell for cell in own if way in cell["ways"]]
            if not found:
                continue
            each = [cell["ways"][way] for cell in found]
            times = [cell["costs"][way] for cell in found if way in cell.get("costs", {})]
            rows.append([
                kind, way, *(spread([one[name] for one in each]) for name in ("accuracy", "nll", "ece")),
                _four([one["aurc"] for one in each]), *(_difference(found, way, rival) for rival in RIVALS),
                *(spread([one["auroc"][shift][by] for one in each]) if by == "total" or _is_random(way) else "-"
                  for shift in shifts for by in ("total", "epistemic")),
                len(each), f"{statistics.fmean(times):.1f}" if times else "-",
            ])  # fmt: skip
    heads = [f"{shift}, {by}" for shift in shifts for by in ("TU", "EU")]
    gaps = [f"AURC less that of the {rival}" for rival in RIVALS]
    return table(["posterior", "prediction", "accuracy", "NLL", "ECE", "AURC", *gaps, *heads, "seeds", "cost"], rows)


def _is_random(way: str) -> bool:
    return not way.startswith("mean network")


def _four(values: Sequence[float]) -> str:
    return f"{statistics.fmean(values):.4f}"


def _difference(cells: Sequence[Mapping[str, Any]], way: str, rival: str) -> str:
    """Return the mean difference of AURC over seeds and its standard error, or "-" without a rival."""
    both = [cell["ways"] for cell in cells if rival in cell["ways"]]
    if way == rival or not both:
        return "-"
    gaps = [ways[way]["aurc"] - ways[rival]["aurc"] for ways in both]
    resampled = [np.subtract(ways[way]["resampled_aurc"], ways[rival]["resampled_aurc"]) / 1e5 for ways in both]
    return "{:+.4f} ± {:.4f}".format(*mean_and_error(gaps, resampled))


def mean_and_error(gaps: Sequence[float], resampled: Sequence[Any]) -> tuple[float, float]:
    """Return the mean of paired differences over seeds, and its standard error over test rows and seeds.

    The variance is the sum of the variance over resampled rows, where all seeds have the same rows, and the variance of
    the mean over seeds. The second one contains some noise of rows, too, so the error is a little too large.

    Args:
        gaps: the difference of each seed.
        resampled: the differences [R] of each seed on resampled test rows.
    """
    over_rows = float(np.std(np.mean(resampled, 0)))
    over_seeds = statistics.stdev(gaps) / math.sqrt(len(gaps)) if len(gaps) > 1 else 0.0
    return statistics.fmean(gaps), math.hypot(over_rows, over_seeds)


if __name__ == "__main__":
    continued(NAME, Arguments, experiment)
