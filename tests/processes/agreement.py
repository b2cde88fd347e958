"""The agreement of launches on several layouts: ``python -m tests.processes.agreement`` (about four idle minutes).

It launches what test_layouts.py does, writes docs/multi_gpu.json and the table of docs/multi_gpu.md.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.table import replaced
from tests.faults.report import circumstances
from tests.processes.test_layouts import LAYOUTS, ROOT, Launch, launch, read

DOCUMENT = ROOT / "docs" / "multi_gpu.md"
RECORD = DOCUMENT.with_suffix(".json")

ROWS = {
    "train": ("4 chains, 20 updates in float64: states against one process", 1e-9),
    "data": ("2 chains, 20 updates in float64: states against one process", 1e-9),
    "gradient4": ("4 chains, the first gradient in float32, relative", 1e-6),
    "gradient2": ("2 chains, the first gradient in float32, relative", 1e-6),
    "replicas": ("2 chains: processes that share a chain against each other", 0.0),
    "same4": ("4 chains with dropout, resumed on the same layout against uninterrupted", 0.0),
    "same2": ("2 chains with dropout, resumed on the same layout against uninterrupted", 0.0),
    "moved4": ("4 chains, begun by 4 processes, resumed by others against one process", 1e-9),
    "moved2": ("2 chains, begun by 4 processes, resumed by others against one process", 1e-9),
}
"""The quantities that are compared, and the largest difference that is allowed."""


def measure(launches: dict[int, Launch]) -> dict[str, dict[str, float | None]]:
    """Row -> processes -> the largest difference; None where there is nothing to compare."""

    def against_one(prefix: str, measure: Callable[[Tensor, Tensor], Tensor], n: int) -> float | None:
        found, expected = (launches[count].find(f"{prefix}/") for count in (n, 1))
        assert found
        assert found.keys() == expected.keys()
        return largest(measure(value, expected[name][0]) for name, values in found.items() for value in values)

    def of(row: str, n: int) -> float | None:
        if row == "replicas":
            copies = chain(*(launches[n].find(f"{run}/theta/").values() for run in ("data", "moved2")))
            return largest(absolute(copy, values[0]) for values in copies for copy in values[1:])
        if row.startswith("same"):
            return largest(numbers[f"resume{row[-1]}/difference"] for numbers in launches[n].numbers)
        if n == 1:
            return None
        return against_one(row, relative if row.startswith("gradient") else absolute, n)

    return {row: {str(n): of(row, n) for n in sorted(launches)} for row in ROWS}


def absolute(one: Tensor, other: Tensor) -> Tensor:
    return (one.double() - other.double()).abs().max()


def relative(one: Tensor, other: Tensor) -> Tensor:
    return torch.linalg.vector_norm(one - other) / torch.linalg.vector_norm(other)


def largest(values: Any) -> float | None:
    return max(map(float, values), default=None)


def render(record: dict[str, Any]) -> str:
    """The table."""
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    counts = sorted(map(int, record["rows"]["train"]))
    lines = [
        "A tiny GPT-2 with LoRA under SGHMC: the largest difference of any number in the chains' states (theta and "
        "momentum), or of the norm of a gradient. "
        f"torchrun, gloo, measured {record['date']} on {record['machine']}; {versions}.",
        "",
        "| | " + " | ".join(f"{n} process{'es' if n > 1 else ''}" for n in counts) + " | at most |",
        "|---|" + "---|" * (len(counts) + 1),
    ]
    for row, (what, limit) in ROWS.items():
        found = [record["rows"][row][str(n)] for n in counts]
        shown = ["" if value is None else "0" if value == 0 else f"{value:.1e}" for value in found]
        lines.append(f"| {what} | {' | '.join(shown)} | {'0: bitwise' if limit == 0 else f'{limit:.0e}'} |")
    return "\n".join(lines)


def main() -> None:
    """Launch every layout, keep and show what was found."""
    with tempfile.TemporaryDirectory() as folder:
        earlier = None
        for processes in LAYOUTS:
            launch(Path(folder) / str(processes), processes, earlier)
            earlier = Path(folder) / str(LAYOUTS[0])
        rows = measure({processes: read(Path(folder) / str(processes), processes) for processes in LAYOUTS})
    RECORD.write_text(json.dumps({**circumstances(), "rows": rows}, indent=1) + "\n")
    write()


def write() -> None:
    """Bring the document up to date with the record."""
    text = render(json.loads(RECORD.read_text()))
    DOCUMENT.write_text(replaced(DOCUMENT.read_text(), "agreement", text))


if __name__ == "__main__":
    main()
