"""The tables of docs/benchmarks.md, made from benchmarks/results/*.json: ``python -m benchmarks.table``."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
DOCUMENT = ROOT / "docs" / "benchmarks.md"
RECORDS = ("cpu", "cpu2", "cuda")
"""Names of kept runs; cpu2: on another processor, by an earlier version."""

_HEAD = """\
| work | measured | 90 % interval | wanted | counted bound | others |
|---|---|---|---|---|---|"""


def row(line: dict[str, Any]) -> str:
    """A line of the table."""
    interval = "" if line["interval"] is None else " to ".join(map(number, line["interval"]))
    wanted = ""
    if line["limit"] is not None:
        wanted = f"at {line['at']} {number(line['limit'])}" + ("" if line["holds"] else ": missed")
    others = ", ".join(f"{name} {number(value)}" for name, value in line["others"].items())
    bound = "" if line["bound"] is None else number(line["bound"])
    measured = f"{number(line['value'])} {line['unit']}"
    return f"| {line['work']} | {measured} | {interval} | {wanted} | {bound} | {others} |"


def number(value: float) -> str:
    """Three digits."""
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def render(record: dict[str, Any]) -> str:
    """The table of a run, and what it was measured on."""
    about = record["machine"]
    parts = [about["accelerator"], about["processor"], f"{about['threads']} threads", about["system"]]
    parts += [f"{name} {about[name]}" for name in ("python", "torch", "transformers", "peft", "hf_bayes")]
    machine = ", ".join(part for part in parts if part)
    size = f"Llama of {record['model']} parameters, {record['dtype']}, {record['rounds']} rounds"
    intro = f"{size}. {machine}; load {record['load_before']:.1f} beforehand."
    found = record.get("breakdown")
    shares = [] if found is None else ["", breakdown(found)]
    return "\n".join([intro, "", _HEAD, *map(row, record["lines"]), *shares])


def breakdown(found: dict[str, Any]) -> str:
    """The table of where the time goes (``benchmarks.breakdown``)."""
    best, kinds = found["best"], list(found["rows"][0]["shares"])
    lines = [
        f"The machine at its best: {best['products'] / 1e9:.3g} G multiply-adds a second (matrices of 2048 x 2048), "
        f"{4 * best['reading'] / 1e9:.3g} GB read a second.",
        "",
        f"| where the time goes | ms | {' | '.join(kinds)} | of the machine's best |",
        "|---|---|" + "---|" * (len(kinds) + 1),
    ]
    for one in found["rows"]:
        shares = " | ".join(f"{100 * one['shares'][kind]:.0f} %" for kind in kinds)
        what = {"products": "multiplying", "reading": "reading"}[one["limit"]]
        lines.append(f"| {one['work']} | {1e3 * one['seconds']:.3g} | {shares} | {100 * one['rate']:.0f} % of {what} |")
    return "\n".join(lines)


def block(name: str) -> str:
    """Return the text between the markers of a kept run."""
    file = RESULTS / f"{name}.json"
    return render(json.loads(file.read_text())) if file.exists() else "No run is kept yet."


def replaced(document: str, name: str, text: str) -> str:
    """``document`` with ``text`` between the markers of a table, its long lines wrapped.

    Raises:
        ValueError: if a marker is missing.
    """
    begin, end = markers(name)
    if begin not in document or end not in document:
        raise ValueError(f"the document has lost its markers {begin} and {end}: put them back")
    before, rest = document.split(begin, 1)
    return f"{before}{begin}\n{wrapped(text)}\n{end}{rest.split(end, 1)[1]}"


def wrapped(text: str, width: int = 100) -> str:
    """Return Markdown text with no line longer than ``width``, except rows of tables and lines of one word."""
    return "\n".join(_wrapped_line(line, width) for line in text.split("\n"))


def _wrapped_line(line: str, width: int) -> str:
    if line.startswith("|") or len(line) <= width:
        return line
    indent = "  " if line.startswith("- ") else ""
    return textwrap.fill(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def markers(name: str) -> tuple[str, str]:
    """Return the markers around a table."""
    return f"<!-- {name}: begin -->", f"<!-- {name}: end -->"


def write() -> None:
    """Bring the document up to date with the results."""
    document = DOCUMENT.read_text()
    for record in RECORDS:
        document = replaced(document, record, block(record))
    DOCUMENT.write_text(document)


if __name__ == "__main__":
    write()
