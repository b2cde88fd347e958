"""The campaign's record and the page that shows it."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.faults.report import DOCS, ROWS, rendered, shortfalls, table

DOCUMENT = (DOCS / "reliability.md").read_text()
RESULTS: dict[str, Any] = json.loads((DOCS / "reliability.json").read_text())


def test_the_page_shows_the_record() -> None:
    assert rendered(DOCUMENT, RESULTS) == DOCUMENT


def test_every_row_of_the_campaign_was_run_and_reached_its_number() -> None:
    assert list(RESULTS["rows"]) == list(ROWS) == [f"F{number}" for number in range(1, 14)]
    assert shortfalls(RESULTS["rows"]) == []
    assert set(re.findall(r"^\| (F\d+) \|", DOCUMENT, flags=re.MULTILINE)) == set(ROWS)


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


def test_the_table_has_a_line_for_each_row() -> None:
    lines = [line for line in table(RESULTS).splitlines() if line.startswith("| F")]
    assert len(lines) == len(ROWS)
    assert all(line.count("|") == 7 for line in lines)


def test_the_makefile_names_the_campaigns_file_in_one_word() -> None:
    """Before conftest.py is found its options are unknown: a file of its own word is taken for what to collect."""
    line = next(line for line in (DOCS.parent / "Makefile").read_text().splitlines() if "-m reliability " in line)
    assert "--reliability=docs/reliability.json" in line.split()
