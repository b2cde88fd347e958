from __future__ import annotations

from pathlib import Path

import pytest

from hf_bayes.cli.output_file import check_file


def test_a_file_in_a_folder_may_be_written_later(tmp_path: Path) -> None:
    check_file(str(tmp_path / "new.html"), flag="--html")
    check_file(str(tmp_path / "new.png"), flag="--output", formats=(".png", ".pdf"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("", "--output must be a file, got an empty name"),
        (".", "--output must be a file, got the folder ."),
        ("missing/x.png", "--output=missing/x.png: there is no folder missing"),
        ("x.doc", "--output must end in .png, .pdf, got x.doc"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, words: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=words):
        check_file(name, flag="--output", formats=(".png", ".pdf"))
