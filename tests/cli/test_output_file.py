from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from hf_bayes.cli.output_file import check_file, write_figure, write_file


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


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "results.json"
    write_file(file, "old", flag="--output_dir")
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        words = r"results\.json \(No space left on device\); what .* is intact: free space, or name .* --output_dir$"
        with pytest.raises(OSError, match="No space left") as caught:
            write_file(file, "new", flag="--output_dir")
    assert caught.value.filename == str(file)
    assert re.search(words, caught.value.strerror)
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]
    assert file.read_text() == "old"
    write_file(file, b"new", flag="--output_dir")
    assert file.read_text() == "new"


def test_a_link_and_a_pipe_stay(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("file")
    write_file(tmp_path / "link", "text")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "text"
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_file(tmp_path / "pipe", "text")
    assert os.read(reader, 9) == b"text"
    os.close(reader)
    assert (tmp_path / "pipe").is_fifo()


@pytest.mark.parametrize(("ending", "first"), [("png", b"\x89PNG"), ("pdf", b"%PDF"), ("svg", b"<?xml")])
def test_the_ending_is_the_format_of_a_figure(ending: str, first: bytes, tmp_path: Path) -> None:
    write_figure(tmp_path / f"x.{ending}", Figure(), flag="--output", dpi=50)
    assert (tmp_path / f"x.{ending}").read_bytes().startswith(first)
