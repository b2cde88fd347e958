from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
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


def test_the_pipe_of_a_shell_is_written(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    write_file(Path(f"/dev/fd/{writer}"), "text", flag="--html")
    os.close(writer)
    assert os.read(reader, 9) == b"text"
    os.close(reader)
    code = "from pathlib import Path; from hf_bayes.cli.output_file import write_file; write_file(Path('{}'), 'text')"
    for place, sink in (("/dev/stdout", "| cat"), ("$1", "")):
        line = f'{sys.executable} -c "{code.format(place)}" {sink}'
        shell = ["bash", "-c", line if sink else f"write() {{ {line}; }}; write >(cat) | cat"]
        assert subprocess.run(shell, capture_output=True, text=True, check=True).stdout == "text"


def test_a_replaced_file_keeps_its_mode(tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text("old")
    for mode in (0o600, 0o664):
        file.chmod(mode)
        write_file(file, f"new {mode}")
        assert (file.read_text(), file.stat().st_mode & 0o7777) == (f"new {mode}", mode)


def test_every_name_of_a_file_stays(tmp_path: Path) -> None:
    (tmp_path / "one").write_text("old")
    os.link(tmp_path / "one", tmp_path / "two")
    write_file(tmp_path / "one", "new")
    assert (tmp_path / "two").read_text() == "new"


@pytest.mark.parametrize(("call", "code"), [("open", errno.EACCES), ("replace", errno.EPERM), ("replace", errno.EBUSY)])
def test_a_file_that_cannot_be_replaced_is_written(
    call: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    file = tmp_path / "page.html"
    file.write_text("old")
    monkeypatch.setattr(os, call, refuse)  # the superuser may write to any folder
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, mode: Path(path).exists() and path != file)
        words = rf"\({os.strerror(code)}\); what was there before is intact: name another place with --html$"
        with pytest.raises(OSError, match="page") as caught:
            write_file(file, "new", flag="--html")
        assert re.search(words, caught.value.strerror)
        assert file.read_text() == "old"
    write_file(file, "new", flag="--html")
    assert file.read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def test_a_failure_of_a_device_promises_nothing() -> None:
    with pytest.raises(OSError, match="No space left on device") as caught:
        write_file(Path("/dev/full"), "text", flag="--html")
    assert "; it may be incomplete: free space, or name" in caught.value.strerror


@pytest.mark.parametrize(("ending", "first"), [("png", b"\x89PNG"), ("pdf", b"%PDF"), ("svg", b"<?xml")])
def test_the_ending_is_the_format_of_a_figure(ending: str, first: bytes, tmp_path: Path) -> None:
    write_figure(tmp_path / f"x.{ending}", Figure(), flag="--output", dpi=50)
    assert (tmp_path / f"x.{ending}").read_bytes().startswith(first)
