from __future__ import annotations

import contextlib
import errno
import os
import resource
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_bayes.posteriors import storage
from hf_bayes.posteriors.posterior import Posterior
from hf_bayes.posteriors.storage import read_directory, write_directory
from tests.faults.children import told_by
from tests.faults.posteriors import draws, equal

ROOT = Path(__file__).parents[3]
FORMAT = "test.checkpoint"
OLD = {"a.safetensors": {"w": torch.zeros(3)}, "members/m0/b.json": {"x": 1}, "members/m1/b.json": {"x": 1}}
NEW = {"a.safetensors": {"w": torch.ones(5)}, "members/m0/b.json": {"x": 2}, "c.json": {}, "README.md": "# new\n"}


def content(directory: Path) -> dict[str, Any]:
    return comparable(read_directory(directory, format=FORMAT))


def comparable(files: dict[str, Any]) -> dict[str, Any]:
    return {
        name: {key: value.tolist() if isinstance(value, torch.Tensor) else value for key, value in file.items()}
        for name, file in files.items()
        if not name.endswith(".md")
    }


def names(directory: Path) -> set[str]:
    return {path.relative_to(directory).as_posix() for path in directory.rglob("*")}


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


def test_an_edited_card_is_kept_and_an_unedited_one_is_renewed(tmp_path: Path) -> None:
    write_directory(tmp_path, {**OLD, "README.md": "first"}, format=FORMAT)
    write_directory(tmp_path, {**OLD, "README.md": "second"}, format=FORMAT)
    assert (tmp_path / "README.md").read_text() == "second"
    (tmp_path / "README.md").write_text("by hand")
    for _ in range(2):
        with pytest.warns(UserWarning, match=r"README\.md .* was edited and is kept"):
            write_directory(tmp_path, NEW, format=FORMAT)
        assert (tmp_path / "README.md").read_text() == "by hand"
        assert content(tmp_path) == comparable(NEW)
    (tmp_path / "README.md").unlink()
    write_directory(tmp_path, NEW, format=FORMAT)
    assert (tmp_path / "README.md").read_text() == NEW["README.md"]


def test_values_that_are_not_finite_are_never_written(tmp_path: Path) -> None:
    write_directory(tmp_path, OLD, format=FORMAT)
    with pytest.raises(ValueError, match=r"a\.safetensors: w holds 1 values"):
        write_directory(tmp_path, {**NEW, "a.safetensors": {"w": torch.tensor([float("nan")])}}, format=FORMAT)
    assert content(tmp_path) == comparable(OLD)


@pytest.mark.parametrize(
    "name", ["../a.json", "/a.json", "a/../b.json", "a.bin", "a.pt", ".a.json", "a\\b.json", "", "a//b.json"]
)
def test_names_that_could_lead_elsewhere_are_not_written(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="not a relative path of plain names"):
        write_directory(tmp_path / "x", {name: {}}, format=FORMAT)
    assert names(tmp_path) == set()


@pytest.mark.parametrize("name", ["model.safetensors", "members/stray.txt"])
def test_foreign_files_that_would_break_it_are_not_overwritten(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("mine")
    for action in (
        lambda: write_directory(tmp_path, OLD, format=FORMAT),
        lambda: storage.check_writable(tmp_path, format=FORMAT),
    ):
        with pytest.raises(ValueError, match=f"{name}, which no manifest of hf_bayes lists"):
            action()
    assert (tmp_path / name).read_text() == "mine"


def test_directory_of_another_format_is_not_overwritten(tmp_path: Path) -> None:
    write_directory(tmp_path, OLD, format=FORMAT)
    with pytest.raises(ValueError, match=r"holds a test\.checkpoint, not a hf_bayes\.posterior"):
        write_directory(tmp_path, NEW, format=storage.POSTERIOR)
    assert content(tmp_path) == comparable(OLD)


def test_a_linked_members_folder_is_refused_before_any_write(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "members").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="members"):
        write_directory(tmp_path / "x", OLD, format=FORMAT)
    assert names(tmp_path / "elsewhere") == set()


def test_plain_directory_is_new_and_complete(tmp_path: Path) -> None:
    storage.write_plain(tmp_path / "a" / "b", {"x.json": {"y": 1}})
    assert names(tmp_path) == {"a", "a/b", "a/b/x.json"}
    with pytest.raises(ValueError, match="is not empty"):
        storage.write_plain(tmp_path / "a", {"x.json": {}})
    with pytest.raises(ValueError, match="holds 1 values"):
        storage.write_plain(tmp_path / "c", {"x.json": {}, "t.safetensors": {"w": torch.tensor(float("nan"))}})
    assert "c" not in names(tmp_path)


# -- refused before training ---------------------------------------------------------------------------------------


def test_writable_directories_pass_and_stay_as_they_are(tmp_path: Path) -> None:
    write_directory(tmp_path / "ours", OLD, format=FORMAT)
    (tmp_path / "resumed" / "checkpoint-3").mkdir(parents=True)
    before = names(tmp_path)
    storage.check_writable(tmp_path / "new" / "deeper", overwrite=False)
    storage.check_writable(tmp_path / "resumed", overwrite=False)
    storage.check_writable(tmp_path / "ours", overwrite=True, format=FORMAT)
    assert names(tmp_path) == before


def test_directory_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(OSError, match=str(path)):
            storage.check_writable(path)


def test_directory_that_cannot_be_written_is_refused() -> None:
    # Even the superuser cannot write there.
    with pytest.raises(OSError, match=r"cannot write to /proc/posterior .*choose another directory"):
        storage.check_writable("/proc/posterior")


def test_directory_that_is_not_empty_needs_overwrite(tmp_path: Path) -> None:
    write_directory(tmp_path, OLD, format=FORMAT)
    with pytest.raises(ValueError, match=r"is not empty .*overwrite=True"):
        storage.check_writable(tmp_path, overwrite=False, format=FORMAT)


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
