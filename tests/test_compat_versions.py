"""The declared versions: constraints files match the bounds of pyproject.toml, and the environment matches both."""

from __future__ import annotations

import os
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
DEPENDENCIES = {canonicalize_name(Requirement(line).name): Requirement(line) for line in PROJECT["dependencies"]}
TESTED_BUILD = "torch"
"""The registry has CPU builds of few versions of torch, so the constraints files share one."""


def pins(name: str) -> dict[str, Version]:
    """Return {package: version} of a constraints file."""
    lines = (
        Requirement(line) for line in (ROOT / name).read_text("utf-8").splitlines() if not line.startswith(("#", "-c "))
    )
    return {canonicalize_name(line.name): Version(next(iter(line.specifier)).version) for line in lines}


@pytest.mark.parametrize("file", ["constraints.txt", "constraints-oldest.txt", "constraints-newest.txt"])
def test_a_constraints_file_stays_within_the_declared_bounds(file: str) -> None:
    pinned = pins(file)
    outside = {name: str(pinned[name]) for name, line in DEPENDENCIES.items() if pinned[name] not in line.specifier}
    assert not outside


def test_the_oldest_constraints_are_the_lower_bounds() -> None:
    pinned = pins("constraints-oldest.txt")
    lower = {
        name: Version(bound.version)
        for name, line in DEPENDENCIES.items()
        for bound in line.specifier
        if bound.operator == ">="
    }
    assert lower.keys() == DEPENDENCIES.keys()
    assert {name: pinned[name] for name in lower if name != TESTED_BUILD} == {
        name: bound for name, bound in lower.items() if name != TESTED_BUILD
    }


def test_the_newest_constraints_are_as_new_as_the_tested_set() -> None:
    newest, tested = pins("constraints-newest.txt"), pins("constraints.txt")
    assert not [name for name in DEPENDENCIES if newest[name] < tested[name]]


def test_the_doors_are_pinned_beside_the_tested_set() -> None:
    """``make test-doors`` installs both files at once, so no package may stand in both."""
    doors = (ROOT / "constraints-doors.txt").read_text("utf-8").splitlines()
    assert "-c constraints.txt" in doors
    assert pins("constraints-doors.txt").keys().isdisjoint(pins("constraints.txt"))
    assert pins("constraints-uqlm.txt")[TESTED_BUILD] == pins("constraints.txt")[TESTED_BUILD]


@pytest.mark.parametrize("name", DEPENDENCIES)
def test_the_installed_version_is_a_declared_one(name: str) -> None:
    installed = Version(version(name))
    assert DEPENDENCIES[name].specifier.contains(installed.public)
    if file := os.environ.get("HF_BAYES_CONSTRAINTS"):  # make test-oldest and make test-newest name theirs
        assert Version(installed.public) == pins(file)[name]
