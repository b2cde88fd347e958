from __future__ import annotations

import ast
import errno
from pathlib import Path

import pytest
from huggingface_hub import RepoCard

from hf_bayes.pipelines.space import app_file, write_space
from hf_bayes.posteriors.storage import disk


def test_the_readme_has_the_header_that_the_hub_reads(tmp_path: Path) -> None:
    write_space(tmp_path / "space", ["user/one", "user/two"])
    assert sorted(path.name for path in (tmp_path / "space").iterdir()) == ["README.md", "app.py", "requirements.txt"]
    header = RepoCard.load(tmp_path / "space" / "README.md").data.to_dict()
    assert (header["sdk"], header["app_file"], header["models"]) == ("gradio", "app.py", ["user/one", "user/two"])
    assert header["sdk_version"][0].isdigit()
    assert (tmp_path / "space" / "requirements.txt").read_text().startswith("hf-bayes[demo]==")


def test_names_in_the_app_are_literals() -> None:
    tree = ast.parse(app_file(["user/one", 'user/"); import os; ("']))
    (names,) = (
        node.value for node in ast.walk(tree) if isinstance(node, ast.Assign) and isinstance(node.value, ast.List)
    )
    assert [ast.literal_eval(name) for name in names.elts] == ["user/one", 'user/"); import os; ("']


def test_a_local_posterior_is_refused(tmp_path: Path) -> None:
    for name in (str(tmp_path), "posterior", "a/b/c", "user/<name>"):
        with pytest.raises(ValueError, match="a Space loads posteriors from the Hub"):
            write_space(tmp_path / "space", [name])


def test_a_posterior_beside_itself_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a Space shows each posterior once, got user/one twice: give another id"):
        write_space(tmp_path / "space", ["user/one", "user/one"])
    assert not (tmp_path / "space").exists()


def test_a_full_disk_leaves_no_part_of_a_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = disk.write

    def full(path: Path, data: bytes) -> None:
        if path.name == "README.md":
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        write(path, data)

    monkeypatch.setattr(disk, "write", full)
    with pytest.raises(OSError, match=f"cannot save to {tmp_path / 'space'}: No space left"):
        write_space(tmp_path / "space", ["user/one"])
    assert not list(tmp_path.iterdir())
