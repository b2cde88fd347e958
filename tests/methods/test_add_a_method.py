"""The worked example of CONTRIBUTING.md, applied to a copy of the repository."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMES = "shared_noise", "SharedNoise"
TABLE = ["hf_bayes/methods/registry.py", "tests/methods/conformance.py"]
INDEX, PUBLIC = "docs/paper_index.md", "hf_bayes/__init__.py"
"""The files that the example changes."""
TESTS = [f"tests/methods/test_{name}.py" for name in (
    "registry", "assembly", "conformance_configs", "conformance_laws", "conformance_resuming",
)]  # fmt: skip
"""The tests that every row of the table passes."""


def example() -> dict[str, str]:
    """Return {file: the text to add}: a whole file, or lines."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    places = re.findall(r"^\d\. `(.+?)`: (.*?)(?=^\d\. |^[^ \n])", text, flags=re.DOTALL | re.MULTILINE)
    lines = {place: re.sub(r"^   ", "", rest, flags=re.MULTILINE).split("```")[1:2] for place, rest in places}
    source, *_ = re.findall(r"```python\n(.*?)```", (ROOT / "docs/add_a_method.md").read_text("utf-8"), flags=re.DOTALL)
    return {place: block[0].split("\n", 1)[1] if block else source for place, block in lines.items()}


def edited(text: str, lines: str) -> str:
    """Return ``text`` with imports added to the imports of the package, and other lines to the end of the table."""
    for line in lines.splitlines(keepends=True):
        if line.startswith("from "):
            at = text.index("from hf_bayes.methods.averaging.ensemble import")
        elif line.startswith("    from "):
            at = text.index("    from hf_bayes.models.attaching import")
        elif '": "methods.' in line:
            at = text.index("\n}\n", text.index("\n_MODULES = {")) + 1
        elif line.endswith('Config",\n'):
            at = text.index("\n]\n", text.index("\n__all__ = [")) + 1
        elif line.startswith("|"):
            at = text.index("\n\n", text.index("|---|")) + 1
        else:
            at = text.index("\n}\n", text.index("\nROWS = {" if "Row(" in line else "\nMETHODS: ")) + 1
        text = text[:at] + line + text[at:]
    return text


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository that contains the method."""
    copy = tmp_path_factory.mktemp("repository")
    for folder in ("hf_bayes", "tests", "docs", "scripts", "benchmarks"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / file, copy / file)
    for place, text in example().items():
        file = copy / place
        file.write_text(edited(file.read_text("utf-8"), text) if file.exists() else text, encoding="utf-8")
    return copy


def outcome(repository: Path, words: str) -> str:
    """Return pytest's output on the conformance table there, for tests whose names contain these words."""
    options = ["-v", "-p", "no:cacheprovider", "-p", "no:xdist", "-o", f"pythonpath={repository}", "-k", words]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *options, *TESTS],
        cwd=repository,
        env={**os.environ, "PYTHONPATH": str(repository)},
        capture_output=True,
        text=True,
        check=False,
    ).stdout


REGISTRATION = "has_a_row or one_file or only_the_registry"


@pytest.mark.statistics
def test_the_example_passes_the_conformance_table(repository: Path) -> None:
    said = outcome(repository, f"shared_noise or sgld or {REGISTRATION}")
    assert "FAILED" not in said, said[-3000:]
    passed = {name: len(re.findall(rf"\b{name}\] PASSED", said)) for name in ("shared_noise", "sgld")}
    assert passed["shared_noise"] == passed["sgld"] > 30  # as many as of a method with the same fields in its row
    assert "test_only_the_registry_and_other_methods_import_a_method PASSED" in said


def test_the_example_touches_five_places_and_no_other_file(repository: Path) -> None:
    def contents(root: Path) -> dict[str, bytes]:
        files = (path for folder in ("hf_bayes", "tests", "docs") for path in (root / folder).rglob("*"))
        kept = (path for path in files if path.is_file() and "__pycache__" not in path.parts)
        return {path.relative_to(root).as_posix(): path.read_bytes() for path in kept}

    before, after = contents(ROOT), contents(repository)
    touched = {name for name, text in after.items() if before.get(name) != text}
    assert touched == {"hf_bayes/methods/sgmcmc/shared_noise.py", *TABLE, INDEX, PUBLIC} == set(example())
    package = {name: text.decode() for name, text in after.items() if name.endswith(".py") and "hf_bayes/" in name}
    naming = {name for name, text in package.items() if any(word in text for word in NAMES)}
    assert naming == {"hf_bayes/methods/sgmcmc/shared_noise.py", "hf_bayes/methods/registry.py", PUBLIC}


@pytest.mark.slow
@pytest.mark.parametrize("place", [*TABLE, INDEX])
def test_a_place_that_is_forgotten_fails_a_test(repository: Path, place: str, tmp_path: Path) -> None:
    shutil.copytree(repository, tmp_path / "without")
    shutil.copy(ROOT / place, tmp_path / "without" / place)
    assert "FAILED" in outcome(tmp_path / "without", REGISTRATION)
