"""The tables of docs/single_pass.md are those of its record."""

from __future__ import annotations

import json

from benchmarks.table import replaced
from scripts.reproduce.single_pass_accuracy import PAGE, RECORD, blocks


def test_tables_of_the_page_are_those_of_its_record() -> None:
    page, record = PAGE.read_text(), json.loads(RECORD.read_text())
    for name, text in blocks(record).items():
        assert replaced(page, name, text) == page
    assert blocks(record)["accuracy"].count("\n") == len(record["accuracy"]) + 1
