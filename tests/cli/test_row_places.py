from __future__ import annotations

import csv
from pathlib import Path

import pytest

from hf_bayes.cli.row_places import place_of


@pytest.mark.parametrize(
    ("name", "content", "lines"),
    [
        ("a.jsonl", '{"a": 1}\n\n{"a": 2}\n{"a": 3}', (1, 3, 4)),
        ("a.csv", 'text,n\n"two\nlines",1\n\nlast,2\n', (2, 5)),
        ("a.tsv", 'text\tn\n"begins\t1\nends"\t2\n', (2, 3)),
    ],
)
def test_a_row_has_the_line_that_an_editor_shows(
    tmp_path: Path, name: str, content: str, lines: tuple[int, ...]
) -> None:
    file = tmp_path / name
    file.write_text(content)
    assert [place_of(str(file), row) for row in range(len(lines))] == [f"line {line} of {file}" for line in lines]


def test_a_long_cell_hides_no_line(tmp_path: Path) -> None:
    before = csv.field_size_limit()
    file = tmp_path / "a.csv"
    file.write_text(f"text,n\n{'a' * (before + 1)},1\nlast,2\n")
    assert place_of(str(file), 1) == f"line 3 of {file}"
    assert csv.field_size_limit() == before


def test_rows_without_a_line_are_counted_from_1(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": 1}')
    assert place_of("the split 'train' of 'imdb'", 0) == "row 1 (counted from 1) of the split 'train' of 'imdb'"
    assert place_of(str(tmp_path / "a.jsonl"), 4) == f"row 5 (counted from 1) of {tmp_path / 'a.jsonl'}"
