from __future__ import annotations

from pathlib import Path

import pytest
from datasets import Dataset

from hf_bayes.cli.local_files import is_local, load_files, matching, with_kinds_of


def write(folder: Path, **files: str) -> list[str]:
    """Write files, whose names have _ in place of the dot, and return their paths."""
    for name, content in files.items():
        (folder / name.replace("_", ".")).write_text(content)
    return [str(folder / name.replace("_", ".")) for name in files]


def test_endings_in_capitals_and_tables_with_tabs_are_read(tmp_path: Path) -> None:
    files = write(tmp_path, a_CSV="text,label\na b,x\n", b_tsv="text\tlabel\na b\tx\n")
    for file in files:
        assert is_local(file)
        assert list(load_files([file])) == [{"text": "a b", "label": "x"}]
    assert matching(str(tmp_path / "*")) == files
    assert not is_local("someone/dataset")


@pytest.mark.parametrize(("separator", "words"), [(";", "semicolons"), ("\t", "tabs")])
def test_another_separator_of_a_table_is_named(tmp_path: Path, separator: str, words: str) -> None:
    files = write(tmp_path, a_csv=f"text{separator}label\na, b{separator}x\n")
    message = rf"a.csv has {words} between its columns \(text, label\), expected commas: save it with commas, or with"
    with pytest.raises(ValueError, match=message):
        load_files(files)


def test_files_with_other_columns_are_no_matter_of_encoding(tmp_path: Path) -> None:
    files = write(tmp_path, a_csv="text,label\na,x\n", b_csv="id,text,label\n1,a,x\n")
    files += write(tmp_path, a_jsonl='{"text": "a"}', b_jsonl='{"text": "a", "id": 0}')
    for pair, columns in ((files[:2], "id, text, label"), (files[2:], "text, id")):
        with pytest.raises(ValueError, match=rf"^{pair[1]} has the columns {columns}, and {pair[0]} has text.*: give"):
            load_files(pair)
    with pytest.raises(ValueError, match=r"broken.jsonl cannot be read as json \(.*\): correct the file$"):
        load_files(write(tmp_path, broken_jsonl='{"text": "a"}\n{"text": \n'))


def test_a_file_in_another_encoding_is_explained(tmp_path: Path) -> None:
    for name in ("latin.txt", "latin.csv", "latin.tsv"):
        (tmp_path / name).write_bytes("text\ncaf\xe9\n".encode("latin-1"))
        with pytest.raises(
            ValueError, match=rf"{name} cannot be read as \w+ .*: correct the file, and save it in UTF-8$"
        ):
            load_files([str(tmp_path / name)])


def test_columns_get_the_kinds_of_other_rows_where_they_can() -> None:
    first = Dataset.from_dict({"text": ["a"], "label": ["x"], "n": [1]})
    rows = with_kinds_of(Dataset.from_dict({"text": ["b"], "label": [7], "n": ["y"], "id": [0]}), first)
    assert list(rows) == [{"text": "b", "label": "7", "n": "y", "id": 0}]
