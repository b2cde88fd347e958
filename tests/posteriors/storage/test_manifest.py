from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from hf_bayes.posteriors.storage import read_directory, write_directory
from tests.posteriors.storage.content import FORMAT, names


@pytest.mark.parametrize(
    "name", ["../a.json", "/a.json", "a/../b.json", "a.bin", "a.pt", ".a.json", "a\\b.json", "", "a//b.json"]
)
def test_names_that_could_lead_elsewhere_are_not_written(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="not a relative path of plain names"):
        write_directory(tmp_path / "x", {name: {}}, format=FORMAT)
    assert names(tmp_path) == set()


FILES = {"a.safetensors": {"w": torch.arange(3.0)}, "members/m0/b.json": {"x": 1}, "c.json": {}}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_directory(tmp_path / "d", FILES, format=FORMAT)
    return tmp_path / "d"


def test_unlisted_files_matter_only_where_tensors_are_looked_for(directory: Path) -> None:
    (directory / "notes.txt").write_text("mine")
    (directory / "checkpoint-1").mkdir()
    (directory / "checkpoint-1" / "model.safetensors").write_text("mine")
    read_directory(directory, format=FORMAT)
    (directory / "members" / "m0" / "more.json").write_text("{}")
    with pytest.raises(ValueError, match=r"members/m0/more\.json, not listed"):
        read_directory(directory, format=FORMAT)


def test_huge_manifest_is_refused_unread(directory: Path) -> None:
    os.truncate(directory / "manifest.json", 2**33)
    with pytest.raises(ValueError, match=r"manifest\.json has 8,589,934,592 bytes, expected at most"):
        read_directory(directory, format=FORMAT)
