"""The runs of ``encoder_table``: the record of finished runs, the missing ones, and the choice on validation rows."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scripts.reproduce.encoder_table_bench import Bench
from scripts.reproduce.encoder_table_methods import Choice, Method, points, settings

DIVERGED = "diverged"


class Record:
    """The results so far, written to disk after every run.

    ``rows[row]["grid"]`` is [[choice, validation NLL]], ``rows[row]["cells"]`` is [[choice, seed, numbers]]. "before"
    holds cells that a later run has replaced, for the seconds that they took on their machine.
    """

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        self.path = path
        before = json.loads(path.read_text()) if path.exists() else {"seconds": 0, "rows": {}}
        if before.get("about", about) != about:
            raise ValueError(
                f"{path} holds runs on other data or of another size: {before['about']}, now {about}. Move it away to "
                "begin anew"
            )
        self.content = {**before, "about": dict(about)}

    def row(self, name: str) -> dict[str, Any]:
        return self.content["rows"].setdefault(name, {"grid": [], "cells": []})

    def settle(self, name: str, settings: Mapping[str, Any]) -> None:
        """Remove the runs of a row that were made with other settings."""
        if self.row(name).get("settings") != settings:
            self.content["rows"][name] = {"settings": settings, "grid": [], "cells": []}

    def find(self, name: str, kind: str, *key: Any) -> Any:
        return next((entry[-1] for entry in self.row(name)[kind] if entry[:-1] == list(key)), None)

    def add(self, found: Mapping[str, Any], kind: str, *key: Any, seconds: float) -> None:
        for name, value in found.items():
            row = self.row(name)
            if replaced := [entry for entry in row[kind] if entry[:-1] == list(key)]:
                row.setdefault("before", []).extend(replaced)
            row[kind] = [*(entry for entry in row[kind] if entry not in replaced), [*key, value]]
        self.content["seconds"] = round(self.content["seconds"] + seconds)
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(self.content, indent=1) + "\n")
        os.replace(part, self.path)


def fill(record: Record, bench: Bench, table_of: Mapping[str, Method]) -> None:
    """Make the missing runs: a grid on one seed's validation rows, then the choice with every seed."""
    for name, method in table_of.items():
        grid = points(method.grid)
        for row in method.readings:
            record.settle(row, settings(method))
        for choice in grid:
            lacking = {row: link for row, link in method.readings.items() if record.find(row, "grid", choice) is None}
            if lacking:
                begin = time.process_time()
                try:
                    found = bench.run(name, method, choice, 0, lacking, test=False)
                except FloatingPointError:  # the learning rate is too large: not a candidate
                    found = {row: {"nll": DIVERGED} for row in lacking}
                scores = {row: part["nll"] for row, part in found.items()}
                record.add(scores, "grid", choice, seconds=time.process_time() - begin)
                print(name, choice, scores, flush=True)
        chosen = {row: best(record.row(row), method) for row in method.readings}
        for seed, choice in itertools.product(range(bench.scale.seeds), grid):
            wanted = {row: link for row, link in method.readings.items() if chosen[row] == choice}
            kept = {row: record.find(row, "cells", choice, seed) or {} for row in wanted}
            lacking = {row: link for row, link in wanted.items() if "diagnostics" not in kept[row]}
            if lacking:
                begin = time.process_time()
                found = bench.run(name, method, choice, seed, lacking, test=True)
                record.add(found, "cells", choice, seed, seconds=time.process_time() - begin)
                print(name, choice, seed, found, flush=True)


def best(kept: Mapping[str, Any], method: Method) -> Choice:
    """Return the point of a method's grid with the lowest validation NLL.

    Raises:
        ValueError: if no point ran to its end.
    """
    grid = points(method.grid)
    scores = [(nll, grid.index(choice)) for choice, nll in kept["grid"] if choice in grid and nll != DIVERGED]
    if not scores:
        raise ValueError(f"no point of the grid {method.grid} has a validation NLL: lower its learning rates")
    return grid[min(scores)[1]]
