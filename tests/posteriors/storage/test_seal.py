from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from hf_bayes.posteriors.storage import check_seal, seal, unseal

FORMAT, FILE = "test.sealed", "seal.json"
CONTENT = {"a.pt": b"one", "rng_state_0.pth": b"two", "chains/manifest.json": b"{}"}


@pytest.fixture
def sealed(tmp_path: Path) -> Path:
    (tmp_path / "chains").mkdir()
    for name, data in CONTENT.items():
        (tmp_path / name).write_bytes(data)
    seal(tmp_path, list(CONTENT), file=FILE, format=FORMAT)
    return tmp_path


def check(root: Path) -> Any:
    return check_seal(root, file=FILE, format=FORMAT)


def test_a_seal_lists_files_that_are_there_already(sealed):
    assert {name: entry.size for name, entry in check(sealed).items()} == {n: len(d) for n, d in CONTENT.items()}
    assert {str(path.relative_to(sealed)) for path in sealed.rglob("*") if path.is_file()} == {*CONTENT, FILE}


@pytest.mark.parametrize("name", CONTENT)
@pytest.mark.parametrize("data", [b"", b"ONE", b"longer than it was"], ids=["empty", "other", "longer"])
def test_a_changed_file_is_named(sealed, name, data):
    (sealed / name).write_bytes(data)
    with pytest.raises(ValueError, match=f"{name} is not the file that seal.json lists"):
        check(sealed)


@pytest.mark.parametrize("name", [*CONTENT, FILE])
def test_a_missing_file_is_named(sealed, name):
    (sealed / name).unlink()
    with pytest.raises(FileNotFoundError, match=f"lacks {name}"):
        check(sealed)


def test_a_link_out_of_the_directory_is_refused(sealed, tmp_path_factory):
    other = tmp_path_factory.mktemp("other") / "a.pt"
    os.replace(sealed / "a.pt", other)
    (sealed / "a.pt").symlink_to(other)
    with pytest.raises(ValueError, match=r"a\.pt is a link to .*: refused"):
        check(sealed)


CORRUPTIONS = {
    "not JSON": lambda values: None,
    "another format": lambda values: {**values, "format": "another"},
    "another version": lambda values: {**values, "format_version": 2},
    "another key": lambda values: {**values, "more": 1},
    "a path that leaves": lambda values: {**values, "files": {"../a.pt": values["files"]["a.pt"]}},
    "no hash": lambda values: {**values, "files": {"a.pt": {"size": 3}}},
    "a list of names": lambda values: {**values, "files": ["a.pt"]},
}


@pytest.mark.parametrize("name", CORRUPTIONS, ids=str)
def test_a_malformed_seal_is_refused(sealed, name):
    values = CORRUPTIONS[name](json.loads((sealed / FILE).read_text()))
    (sealed / FILE).write_text("{" if values is None else json.dumps(values))
    with pytest.raises(ValueError, match=r"seal\.json"):
        check(sealed)


def test_sealing_a_file_that_is_missing_leaves_no_seal(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"a\.pt"):
        seal(tmp_path, ["a.pt"], file=FILE, format=FORMAT)
    assert not (tmp_path / FILE).exists()


def test_unsealing_removes_the_seal_and_may_be_repeated(sealed):
    unseal(sealed, file=FILE)
    unseal(sealed, file=FILE)
    assert not (sealed / FILE).exists()
