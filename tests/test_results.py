"""The pages of docs/results say what their records say."""

from __future__ import annotations

import json

import pytest

from scripts.reproduce import report

RECORDS = sorted(report.RESULTS.glob("*.json"))


@pytest.mark.parametrize("record", RECORDS, ids=[record.stem for record in RECORDS])
def test_a_page_shows_its_record(record) -> None:
    page = record.with_suffix(".md").read_text()
    rendered = report.tables(record.stem, json.loads(record.read_text()), page)
    assert page == rendered, "run python -m scripts.reproduce.report"


def test_every_page_is_listed_and_made_by_a_script() -> None:
    scripts = report.RESULTS.parents[1] / "scripts" / "reproduce"
    index = (report.RESULTS / "README.md").read_text()
    for page in report.RESULTS.glob("*.md"):
        if page.stem != "README":
            assert f"({page.name})" in index
            assert (scripts / f"{page.stem}.py").exists()
            assert page.with_suffix(".json").exists()


def test_a_spread_is_mean_and_standard_deviation() -> None:
    assert report.spread([1.0, 2.0, 3.0]) == "2.000 ± 1.000"
    assert report.spread([0.5], 1) == "0.5"
    assert report.table(["a", "b"], [[1, 0.12345]]) == "| a | b |\n| --- | --- |\n| 1 | 0.123 |"


def test_lists_of_numbers_of_a_record_stand_on_one_line() -> None:
    record = {"runs": [{"x": 1.0, "y": [1, 2.5, None]}], "words": ["a", "b"]}
    text = report.as_text(record)
    assert '"y": [ 1, 2.5, null ]\n' in text
    assert json.loads(text) == record
