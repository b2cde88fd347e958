from __future__ import annotations

from pathlib import Path

import pytest

from hf_bayes.posteriors import storage
from hf_bayes.posteriors.storage import write_directory
from tests.posteriors.storage.content import FORMAT, NEW, OLD, comparable, content, names


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


@pytest.mark.parametrize("name", ["members", "members/m0", "members/new/deeper"])
def test_a_folder_within_a_saved_directory_is_refused(tmp_path: Path, name: str) -> None:
    write_directory(tmp_path / "x", OLD, format=FORMAT)
    (tmp_path / "link").symlink_to(tmp_path / "x")
    refused = r"lies in a test\.checkpoint, .*unreadable.* choose another|is not empty"
    for folder in (tmp_path / "x" / name, tmp_path / "link" / name):
        for check in (storage.check_folder, storage.check_writable, storage.check_new):
            with pytest.raises(ValueError, match=refused):
                check(folder)
    assert content(tmp_path / "x") == comparable(OLD)
    for beside in ("notes", "checkpoint-3/members"):  # of these no reader takes a file
        storage.check_folder(tmp_path / "x" / beside)
        storage.check_new(tmp_path / "x" / beside)


def test_a_save_replaces_the_folders_of_its_own_files(tmp_path: Path) -> None:
    write_directory(tmp_path / "x", OLD, format=FORMAT)
    (tmp_path / "x" / "checkpoint-3").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "x" / "members" / "m0")
    for source in ("x", "x/members", "x/members/m1", "link"):
        assert storage.replaces(tmp_path / "x", tmp_path / source)
    for source in ("x/checkpoint-3", "x/members/m7", "elsewhere", "."):
        assert not storage.replaces(tmp_path / "x", tmp_path / source)
    assert storage.replaces(tmp_path / "new", tmp_path / "new")
