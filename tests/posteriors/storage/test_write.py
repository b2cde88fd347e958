from __future__ import annotations

import contextlib
import errno
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_bayes.posteriors import storage
from hf_bayes.posteriors.posterior import Posterior
from hf_bayes.posteriors.storage import write_directory
from tests.faults.children import told_by
from tests.faults.posteriors import draws, equal
from tests.posteriors.storage.content import FORMAT, NEW, OLD, comparable, content, names

ROOT = Path(__file__).parents[3]


# -- F1: killed writers --------------------------------------------------------------------------------------------


def kills(tmp_path: Path, count: int) -> dict[str, Any]:
    return told_by("tests.faults.kills", tmp_path, count, 0)


def check_kills(result: dict[str, Any], count: int) -> None:
    for direction in ("grow", "shrink"):
        outcomes = result[direction]
        assert set(outcomes) == {"old", "new"}
        # There is one commit: after a reader finds the new posterior, no later kill restores the old one.
        assert outcomes == sorted(outcomes, reverse=True)
        assert len(outcomes) > 20
    # The twin writes the files in place and the manifest last. A kill in between leaves an unreadable directory.
    assert any(outcome.startswith("unreadable") for outcome in result["twin"])
    assert sum(result["random"].values()) == count
    assert set(result["random"]) <= {"one", "other"}
    assert set(result["reads"]) <= {"one", "other"}


def test_killed_writers_leave_the_old_or_the_new_posterior(tmp_path: Path) -> None:
    check_kills(kills(tmp_path, 20), 20)


@pytest.mark.reliability("F1")
@pytest.mark.slow
def test_200_killed_writers_leave_the_old_or_the_new_posterior(tmp_path: Path, injected: Callable[[int], None]) -> None:
    result = kills(tmp_path, 200)
    injected(200 + len(result["grow"]) + len(result["shrink"]))
    check_kills(result, 200)


def test_a_replaced_text_is_renewed_by_the_next_save(tmp_path: Path) -> None:
    write_directory(tmp_path, {**OLD, "README.md": "first"}, format=FORMAT)
    (tmp_path / "README.md").write_text("by hand")
    storage.replace_text(tmp_path, "README.md", "second", format=FORMAT)
    assert (tmp_path / "README.md").read_text() == "second"
    assert content(tmp_path) == comparable(OLD)
    write_directory(tmp_path, NEW, format=FORMAT)
    assert (tmp_path / "README.md").read_text() == NEW["README.md"]
    assert content(tmp_path) == comparable(NEW)
    with pytest.raises(FileNotFoundError, match=r"holds no manifest\.json that can be read: README\.md has no place"):
        storage.replace_text(tmp_path / "new", "README.md", "third", format=FORMAT)
    assert not (tmp_path / "new").exists()


# -- F2: full disk -------------------------------------------------------------------------------------------------


@pytest.fixture
def unsynced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turn fsync off. It matters after a power cut only, and these tests save some hundred times."""
    monkeypatch.setattr(os, "fsync", lambda file: None)


@contextlib.contextmanager
def failing(call: str, number: int, code: int, *, lasting: bool) -> Iterator[list[int]]:
    """Make the ``number``-th of these system calls fail, and all later ones if ``lasting``. Yield the count left."""
    original, left = getattr(os, call), [number]

    def fail(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] >= 0 or (left[0] < -1 and not lasting):
            return original(*args, **kwargs)
        if call == "write":  # half of the bytes are written, as on a real disk
            original(args[0], bytes(args[1])[: len(args[1]) // 2])
        raise OSError(code, os.strerror(code))

    setattr(os, call, fail)
    try:
        yield left
    finally:
        setattr(os, call, original)


@pytest.mark.reliability("F2")
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO], ids=errno.errorcode.get)
@pytest.mark.usefixtures("unsynced")
def test_a_full_disk_at_any_write_leaves_only_the_old_posterior(
    tmp_path: Path, code: int, injected: Callable[[int], None]
) -> None:
    injected(7)
    old, new = draws(2, seed=1), draws(3, seed=2)
    old.save_pretrained(tmp_path)
    before = names(tmp_path)
    # One write for each of: config, card, three members, manifest, list of obsolete files.
    for number in range(7):
        with (
            failing("write", number, code, lasting=True),
            pytest.raises(OSError, match=r"needs about .* what was there before is intact") as caught,
        ):
            new.save_pretrained(tmp_path)
        assert caught.value.errno == code
        assert str(tmp_path) in str(caught.value)
        assert equal(Posterior.from_pretrained(tmp_path), old)
        assert names(tmp_path) == before
    with failing("write", 7, code, lasting=True):
        new.save_pretrained(tmp_path)
    assert equal(Posterior.from_pretrained(tmp_path), new)


@pytest.mark.reliability("F2")
@pytest.mark.parametrize("lasting", [False, True], ids=["once", "for_good"])
@pytest.mark.parametrize("call", ["fsync", "mkdir", "rename", "replace", "unlink", "rmdir"])
@pytest.mark.usefixtures("unsynced")
def test_failure_of_any_system_call_leaves_a_complete_posterior(
    tmp_path: Path, call: str, lasting: bool, injected: Callable[[int], None]
) -> None:
    old, new = draws(2, seed=1), draws(1, seed=2)
    old.save_pretrained(tmp_path)
    before = names(tmp_path)
    for number in range(100):
        with failing(call, number, errno.EIO, lasting=lasting) as left, contextlib.suppress(OSError):
            new.save_pretrained(tmp_path)
        found = Posterior.from_pretrained(tmp_path)
        assert equal(found, old) or equal(found, new)
        old.save_pretrained(tmp_path)
        assert names(tmp_path) == before
        if left[0] >= 0:
            break
    injected(number)
    assert equal(found, new)


# -- replacing -----------------------------------------------------------------------------------------------------


def test_save_replaces_its_files_and_leaves_those_of_the_user(tmp_path: Path) -> None:
    write_directory(tmp_path, OLD, format=FORMAT)
    for name in ("checkpoint-7/model.safetensors", "runs/log", "training_args.bin", ".gitattributes"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("mine")
    inode = (tmp_path / "checkpoint-7").stat().st_ino
    write_directory(tmp_path, NEW, format=FORMAT)
    assert content(tmp_path) == comparable(NEW)
    assert (tmp_path / "checkpoint-7").stat().st_ino == inode
    kept = {"checkpoint-7", "checkpoint-7/model.safetensors", "runs", "runs/log", "training_args.bin", ".gitattributes"}
    assert names(tmp_path) == {*NEW, *kept, "manifest.json", "members", "members/m0"}


def test_values_that_are_not_finite_are_never_written(tmp_path: Path) -> None:
    write_directory(tmp_path, OLD, format=FORMAT)
    with pytest.raises(ValueError, match=r"a\.safetensors: w holds 1 values"):
        write_directory(tmp_path, {**NEW, "a.safetensors": {"w": torch.tensor([float("nan")])}}, format=FORMAT)
    assert content(tmp_path) == comparable(OLD)


def test_plain_directory_is_new_and_complete(tmp_path: Path) -> None:
    storage.write_plain(tmp_path / "a" / "b", {"x.json": {"y": 1}})
    assert names(tmp_path) == {"a", "a/b", "a/b/x.json"}
    with pytest.raises(ValueError, match="is not empty"):
        storage.write_plain(tmp_path / "a", {"x.json": {}})
    with pytest.raises(ValueError, match="holds 1 values"):
        storage.write_plain(tmp_path / "c", {"x.json": {}, "t.safetensors": {"w": torch.tensor(float("nan"))}})
    assert "c" not in names(tmp_path)


# -- refused before training ---------------------------------------------------------------------------------------


def test_package_reads_no_pickle_and_evaluates_no_text() -> None:
    import ast

    forbidden = {"torch.load", "pickle.load", "pickle.loads", "joblib.load", "eval", "exec", "marshal.loads"}
    calls = Counter(
        f"{path.relative_to(ROOT)}: {name}"
        for path in (ROOT / "hf_bayes").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and (name := ast.unparse(node.func)) in forbidden
    )
    assert not calls


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_plain_directory_on_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "write", full)
    target = tmp_path / "a" / "b"
    words = (
        rf"^cannot save to {target}: No space left on device at .*x\.json\. The save needs about 0 bytes, .* are free"
    )
    with pytest.raises(OSError, match="No space") as caught:
        storage.write_plain(target, {"x.json": {}})
    assert re.match(words, caught.value.strerror)
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(target))
    assert names(tmp_path) == set()


def test_an_empty_directory_is_filled_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    volume = tmp_path / "volume"
    volume.mkdir()
    volume.chmod(0o2770)
    (volume / ".git").mkdir()  # of a fresh clone
    (tmp_path / "link").symlink_to("volume")
    before = volume.stat()
    monkeypatch.chdir(volume)
    for directory in (".", tmp_path / "link"):
        storage.write_plain(directory, {"x.json": {}, "y/z.json": {}})
        assert set(os.listdir(".")) == {".git", "x.json", "y"}  # the working directory is not a deleted one
        assert names(volume) >= {"x.json", "y", "y/z.json"}
        after = volume.stat()
        assert (after.st_ino, after.st_mode) == (before.st_ino, before.st_mode)
        (volume / "x.json").unlink()
        (volume / "y" / "z.json").unlink()
        (volume / "y").rmdir()
    assert (tmp_path / "link").is_symlink()


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_directory_that_is_half_filled_is_emptied(number: int, tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    with failing("rename", number, errno.EBUSY, lasting=True), pytest.raises(OSError, match="Choose another directory"):
        storage.write_plain(tmp_path, {"a/b.json": {}, "manifest.json": {}, "z.json": {}})
    assert os.listdir(tmp_path) == [".git"]


def test_the_manifest_of_a_filled_directory_is_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[str] = []
    rename = os.rename
    monkeypatch.setattr(os, "rename", lambda source, target: (moved.append(Path(target).name), rename(source, target)))
    storage.write_plain(tmp_path, {"a/b.json": {}, "manifest.json": {}, "z.json": {}})
    assert moved == ["a", "z.json", "manifest.json"]


def test_a_hidden_file_of_the_user_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / ".x.json").write_text("mine")
    filling = storage.new_directory(tmp_path)
    staging = filling.__enter__()
    for name in (".x.json", "a.json"):
        (staging / name).write_text("new")
    with pytest.raises(OSError, match=re.escape(f"File exists at {tmp_path}/.x.json")):
        filling.__exit__(None, None, None)
    assert os.listdir(tmp_path) == [".x.json"]
    assert (tmp_path / ".x.json").read_text() == "mine"


def test_a_missing_file_that_is_read_is_no_failed_save(tmp_path: Path) -> None:
    base = tmp_path / "base" / "config.json"
    with (
        pytest.raises(FileNotFoundError, match=re.escape(f"No such file or directory: '{base}'")),
        storage.new_directory(tmp_path / "out"),
    ):
        base.read_text()
    assert names(tmp_path) == set()
