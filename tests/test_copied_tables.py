"""Tables that stand on two pages have equal cells."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def tables(text: str) -> Iterator[tuple[list[str], list[list[str]]]]:
    """Yield the heading and the rows of each table of a page, cell by cell."""
    for block in re.findall(r"^\|.*?\n(?!\|)", text, flags=re.DOTALL | re.MULTILINE):
        heading, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()]
        yield heading, rows


def rows_of_tables(text: str) -> dict[tuple[str, str], list[str]]:
    """{(first cell of a row, heading of a column): the cells there}, over all tables of a page."""
    cells: dict[tuple[str, str], list[str]] = {}
    for heading, rows in tables(text):
        for name, *row in rows:
            for column, cell in zip(heading[1:], row, strict=True):
                cells.setdefault((name, column), []).append(cell)
    return cells


def part(page: str, begin: str | None = None, end: str | None = None) -> str:
    """Return the text of a page from one mark to another."""
    text = (ROOT / page).read_text("utf-8")
    return text[text.index(begin) if begin else 0 : text.index(end) if end else None]


@pytest.mark.parametrize(
    ("copied", "source"),
    [
        (("README.md",), ("docs/results/recommend.md", "<!-- clinc_last: begin -->", "<!-- clinc_last: end -->")),
        (
            ("docs/benchmarks.md", None, "<!-- cpu: begin -->"),
            ("docs/benchmarks.md", "<!-- cpu: begin -->", "<!-- cpu: end -->"),
        ),
    ],
    ids=["README", "benchmarks"],
)
def test_a_table_that_is_copied_equals_its_source(copied: tuple[str, ...], source: tuple[str, ...]) -> None:
    shown, cells = rows_of_tables(part(*copied)), rows_of_tables(part(*source))
    assert shown
    assert {place: cells.get(place) for place in shown} == shown


def rows_by_heading(text: str) -> list[dict[str, str]]:
    """{heading of a column: cell} of every row of every table of a page."""
    return [dict(zip(heading, row, strict=True)) for heading, rows in tables(text) for row in rows]


def test_the_figures_of_the_chooser_are_those_of_the_results() -> None:
    """Check that each figure is a part of a row of a page that is made from JSON."""
    results = ("recommend", "golds", "encoder_table")
    sources = (*(f"docs/results/{name}.md" for name in results), "docs/benchmarks.md")
    known = [row.items() for page in sources for row in rows_by_heading(part(page))]
    shown = [row for row in rows_by_heading(part("docs/choose.md")) if "you need" not in row]
    assert len(shown) > 20
    assert [row for row in shown if not any(row.items() <= of for of in known)] == []
