from __future__ import annotations

import hashlib
from pathlib import Path

from hf_bayes.posteriors.storage import read_directory, write_directory
from hf_bayes.posteriors.storage.manifest import MANIFEST, PENDING, PREFIX, STAGING
from hf_bayes.posteriors.storage.recovery import recover
from tests.posteriors.storage.content import FORMAT


def test_a_committed_save_is_completed(tmp_path: Path) -> None:
    write_directory(tmp_path, {"a.json": {"x": 1}}, format=FORMAT)
    digest = hashlib.sha256((tmp_path / MANIFEST).read_bytes()).hexdigest()
    pending = tmp_path / f"{PENDING}{digest}"
    pending.mkdir()
    (tmp_path / "a.json").rename(pending / "a.json")  # as a process leaves it that was killed after the commit
    recover(tmp_path)
    assert read_directory(tmp_path, format=FORMAT) == {"a.json": {"x": 1}}
    assert not list(tmp_path.glob(f"{PREFIX}*"))


def test_an_unfinished_save_is_removed(tmp_path: Path) -> None:
    write_directory(tmp_path, {"a.json": {"x": 1}}, format=FORMAT)
    for leftover in (f"{STAGING}1", f"{PENDING}{'0' * 64}"):  # the second of another manifest
        (tmp_path / leftover).mkdir()
        (tmp_path / leftover / "a.json").write_text('{"x": 2}')
    (tmp_path / "notes.txt").write_text("mine")
    recover(tmp_path)
    assert read_directory(tmp_path, format=FORMAT) == {"a.json": {"x": 1}}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", MANIFEST, "notes.txt"]
