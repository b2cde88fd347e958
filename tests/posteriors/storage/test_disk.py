from __future__ import annotations

import errno
import os
import resource
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError

from hf_bayes.posteriors.storage import disk, write_directory
from tests.posteriors.storage.content import FORMAT, NEW, OLD, comparable, content, names


@pytest.mark.reliability("F2")
def test_file_size_limit_is_reported_with_the_bytes_needed(tmp_path: Path) -> None:
    write_directory(tmp_path, OLD, format=FORMAT)
    before = names(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, hard))
    try:
        with pytest.raises(OSError, match="needs about 4,194,304 bytes") as caught:
            write_directory(tmp_path, {"a.safetensors": {"w": torch.zeros(2**20)}}, format=FORMAT)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.errno == errno.EFBIG
    assert names(tmp_path) == before
    assert content(tmp_path) == comparable(OLD)


def test_failed_first_save_leaves_no_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "write", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    with pytest.raises(OSError, match="full"):
        write_directory(tmp_path / "a" / "b", NEW, format=FORMAT)
    assert names(tmp_path) == set()


def test_everything_is_synced_before_the_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut keeps synced files only. The manifest must never be on disk before the files that it lists."""
    write_directory(tmp_path, OLD, format=FORMAT)
    events: list[str] = []
    paths: dict[int, str] = {}
    fsync, replace, opened = os.fsync, os.replace, os.open

    def note_open(path: Any, *args: Any, **kwargs: Any) -> int:
        handle = opened(path, *args, **kwargs)
        paths[handle] = os.fspath(path)
        return handle

    monkeypatch.setattr(os, "open", note_open)
    monkeypatch.setattr(os, "fsync", lambda file: (events.append(f"sync {paths[file]}"), fsync(file)))
    monkeypatch.setattr(os, "replace", lambda a, b: (events.append(f"replace {b}"), replace(a, b)))
    write_directory(tmp_path, NEW, format=FORMAT)
    commit = events.index(f"replace {tmp_path / 'manifest.json'}")
    synced = [event for event in events[:commit] if event.startswith("sync")]
    for name in [*NEW, "manifest.json"]:
        assert any(event.endswith(name) and "_hf_bayes_" in event for event in synced), name
    assert events[commit - 1] == events[commit + 1] == f"sync {tmp_path}"
    assert all(event.startswith("sync") for event in events[:commit])
    assert any(event.startswith("replace") for event in events[commit + 2 :])


def test_concurrent_writers_take_turns(tmp_path: Path) -> None:
    threads = [
        threading.Thread(target=write_directory, args=(tmp_path, files), kwargs={"format": FORMAT})
        for files in (OLD, NEW) * 4
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert content(tmp_path) in (comparable(OLD), comparable(NEW))
    assert not any(name.startswith("_hf_bayes") for name in names(tmp_path))


def test_a_library_reports_a_failure_of_the_disk() -> None:
    found = disk.failure(SafetensorError("I/O error: No space left on device (os error 28)"), [])
    assert found is not None
    assert (found.errno, found.strerror) == (errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert disk.failure(ValueError("another"), []) is None
    assert disk.failure(OSError("words of a library"), []) is None


def test_only_an_error_of_the_written_files_is_a_failure(tmp_path: Path) -> None:
    for name, count in (("out/x", 1), ("base/config.json", 0), ("outside", 0), (None, 1)):
        error = OSError(errno.EACCES, "denied", None if name is None else str(tmp_path / name))
        assert disk.failure(error, [tmp_path / "out"]) is (error if count else None)


@pytest.mark.parametrize(
    ("code", "words"),
    [(errno.ENOSPC, "Free space or choose another"), (errno.EDQUOT, "Free space or"), (errno.EBUSY, "Choose another")],
)
def test_free_space_is_the_advice_for_a_full_disk(code: int, words: str, tmp_path: Path) -> None:
    error = disk.explained(OSError(code, "reason"), tmp_path, None, committed=False)
    assert f"is intact. {words}" in error.strerror
