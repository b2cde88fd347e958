from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_bayes.posteriors.storage import listed_files, read_directory, read_file, write_directory
from tests.faults.attacks import leads_out
from tests.faults.children import told_by
from tests.faults.corruptions import FAULTS
from tests.faults.edits import sign

FORMAT = "test.checkpoint"
FILES = {"a.safetensors": {"w": torch.arange(3.0)}, "members/m0/b.json": {"x": 1}, "c.json": {}}


# -- F3 and F8 -----------------------------------------------------------------------------------------------------


def campaign(tmp_path: Path, count: int) -> dict[str, Any]:
    return told_by("tests.faults.campaign", tmp_path, count, 0)


def check_faults(faults: dict[str, Any], count: int) -> None:
    assert faults["kinds"] >= 25
    assert sum(faults["tally"].values()) == count
    assert faults["wrong"] == []
    assert set(faults["tally"]) <= {"refused", "accepted_same"}


def check_attacks(attacks: dict[str, Any]) -> None:
    assert attacks["variants"] >= 40
    assert attacks["wrong"] == []


def test_no_damage_is_accepted_and_no_attack_succeeds(tmp_path: Path) -> None:
    result = campaign(tmp_path, len(FAULTS))
    check_faults(result["faults"], len(FAULTS))
    check_attacks(result["attacks"])


@pytest.fixture(scope="module")
def of_500(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return campaign(tmp_path_factory.mktemp("campaign"), 500)


@pytest.mark.slow
@pytest.mark.reliability("F3")
def test_no_damage_of_500_is_accepted(of_500: dict[str, Any], injected: Callable[[int], None]) -> None:
    injected(500)
    check_faults(of_500["faults"], 500)


@pytest.mark.slow
@pytest.mark.reliability("F3", twin=True)
def test_a_loader_without_checks_accepts_damaged_posteriors(of_500: dict[str, Any]) -> None:
    assert of_500["faults"]["naive"]["accepted_different"] > 50


@pytest.mark.slow
@pytest.mark.reliability("F8")
def test_no_attack_runs_or_reads_outside(of_500: dict[str, Any], injected: Callable[[int], None]) -> None:
    injected(of_500["attacks"]["variants"])
    check_attacks(of_500["attacks"])


@pytest.mark.slow
@pytest.mark.reliability("B31")
def test_no_path_in_a_manifest_leads_out(tmp_path: Path, injected: Callable[[int], None]) -> None:
    attacks = campaign(tmp_path, 0)["attacks"]
    injected(attacks["ways_out"])
    assert [name for name in attacks["wrong"] if leads_out(name)] == []


# -- bytes ---------------------------------------------------------------------------------------------------------


def test_bytes_come_back_as_they_were(tmp_path: Path) -> None:
    files = {"a.json": b'{"x":  1}', "b.jinja": b"\xff", "c.json": {"y": 2}}
    write_directory(tmp_path, files, format=FORMAT)
    assert read_directory(tmp_path, format=FORMAT, raw=lambda name: name == "a.json") == files
    (tmp_path / "b.jinja").write_bytes(b"\xfe")
    with pytest.raises(ValueError, match=r"b\.jinja: sha256 mismatch"):
        read_directory(tmp_path, format=FORMAT)


def test_sizes_are_refused_before_a_file_is_read(tmp_path: Path) -> None:
    write_directory(tmp_path, {f"{name}.txt": b"" for name in "abcde"}, format=FORMAT)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    for name, entry in manifest["files"].items():
        entry["size"] = 60 * 2**20
        os.truncate(tmp_path / name, entry["size"])  # holes, which take no space
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(
        ValueError, match=r"314,572,800 bytes of files beside the tensors, expected at most 268,435,456"
    ):
        read_directory(tmp_path, format=FORMAT)
    with pytest.raises(ValueError, match=r"x\.txt has 67,108,865 bytes, at most 67,108,864 can be read again"):
        write_directory(tmp_path / "other", {"x.txt": bytes(64 * 2**20 + 1)}, format=FORMAT)


# -- messages ------------------------------------------------------------------------------------------------------


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_directory(tmp_path / "d", FILES, format=FORMAT)
    return tmp_path / "d"


def test_missing_places_are_named(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="does not exist"):
        read_directory(tmp_path / "nothing", format=FORMAT)
    with pytest.raises(NotADirectoryError, match="is a file, expected a directory"):
        read_directory(directory / "a.safetensors", format=FORMAT)
    with pytest.raises(FileNotFoundError, match=r"holds no manifest\.json: it is not a test\.checkpoint") as caught:
        read_directory(tmp_path, format=FORMAT)
    assert str(caught.value).count(str(tmp_path)) == 1
    with pytest.raises(ValueError, match=r"format is 'test\.checkpoint', expected 'hf_bayes\.posterior'"):
        read_directory(directory, format="hf_bayes.posterior")


def test_flipped_bit_is_named_with_both_hashes(directory: Path) -> None:
    path = directory / "a.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(
        ValueError, match=r"a\.safetensors: sha256 mismatch: got [0-9a-f]{64}, manifest\.json lists [0-9a-f]{64}"
    ):
        read_directory(directory, format=FORMAT)


def test_truncated_file_is_named_with_both_sizes(directory: Path) -> None:
    os.truncate(directory / "a.safetensors", 10)
    with pytest.raises(ValueError, match=r"a\.safetensors has 10 bytes, manifest\.json lists \d+"):
        read_directory(directory, format=FORMAT)


def test_only_the_chosen_files_are_read_but_all_must_be_there(directory: Path) -> None:
    assert set(read_directory(directory, format=FORMAT, only=lambda name: name == "c.json")) == {"c.json"}
    assert set(listed_files(directory, format=FORMAT)) == set(FILES)
    (directory / "a.safetensors").unlink()
    with pytest.raises(ValueError, match=r"a\.safetensors is missing"):
        read_directory(directory, format=FORMAT, only=lambda name: name == "c.json")


# -- links ---------------------------------------------------------------------------------------------------------


def as_hub_cache(source: Path, cache: Path, name: str = "posterior") -> Path:
    """Make a cache of the Hub, in which the files of a snapshot are links into the repository's blobs."""
    repository = cache / f"models--user--{name}"
    snapshot = repository / "snapshots" / ("0" * 40)
    (repository / "blobs").mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(snapshot.name)
    for number, path in enumerate(sorted(path for path in source.rglob("*") if path.is_file())):
        blob = repository / "blobs" / f"{number:040d}"
        shutil.copy(path, blob)
        link = snapshot / path.relative_to(source)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    return snapshot


def test_snapshot_of_the_hub_cache_is_read_through_its_links(directory: Path, tmp_path: Path) -> None:
    snapshot = as_hub_cache(directory, tmp_path / "cache")
    assert set(read_directory(snapshot, format=FORMAT)) == set(FILES)
    # The same holds when the whole cache is reached through a link.
    (tmp_path / "link").symlink_to(tmp_path / "cache")
    read_directory(tmp_path / "link" / snapshot.relative_to(tmp_path / "cache"), format=FORMAT)


def test_subfolder_of_a_snapshot_is_read(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "repository").mkdir()
    shutil.move(directory, tmp_path / "repository" / "sub")
    snapshot = as_hub_cache(tmp_path / "repository", tmp_path / "cache")
    assert set(read_directory(snapshot / "sub", format=FORMAT)) == set(FILES)


def test_links_that_leave_the_snapshot_are_refused(directory: Path, tmp_path: Path) -> None:
    snapshot = as_hub_cache(directory, tmp_path / "cache")
    other = tmp_path / "cache" / "models--other--secret" / "blobs" / "x"
    other.parent.mkdir(parents=True)
    for target in (other, tmp_path / "outside"):
        shutil.copy(directory / "a.safetensors", target)
        (snapshot / "a.safetensors").unlink()
        (snapshot / "a.safetensors").symlink_to(target)
        with pytest.raises(ValueError, match=r"a\.safetensors is a link to .*outside of .*refused"):
            read_directory(snapshot, format=FORMAT)


def test_blobs_that_are_a_link_do_not_open_what_they_point_to(directory: Path, tmp_path: Path) -> None:
    snapshot = as_hub_cache(directory, tmp_path / "cache")
    blobs = snapshot.parents[1] / "blobs"
    shutil.move(blobs, tmp_path / "elsewhere")
    blobs.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="is a link to"):
        read_directory(snapshot, format=FORMAT)


def test_link_that_stays_inside_is_read(directory: Path) -> None:
    shutil.copy(directory / "a.safetensors", directory / "kept.bin")
    (directory / "a.safetensors").unlink()
    (directory / "a.safetensors").symlink_to("kept.bin")
    sign(directory)
    read_directory(directory, format=FORMAT)


def test_single_file_is_read_strictly_and_inside_only(directory: Path, tmp_path: Path) -> None:
    assert torch.equal(read_file(directory, "a.safetensors")["w"], torch.arange(3.0))
    (tmp_path / "b.json").write_text("{}")
    with pytest.raises(ValueError, match="not a relative path"):
        read_file(directory, "../b.json")
    (directory / "b.json").symlink_to(tmp_path / "b.json")
    with pytest.raises(ValueError, match="outside of"):
        read_file(directory, "b.json")
