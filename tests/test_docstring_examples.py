"""Every example in a docstring (``>>>``) runs and prints what it shows."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

from hf_bayes.uncertainty.custom import registry

PACKAGE = Path(__file__).parents[1] / "hf_bayes"
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def module_of(path: Path) -> str:
    """Return the name of the module in this file."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = sorted(module_of(path) for path in PACKAGE.rglob("*.py") if ">>> " in path.read_text("utf-8"))


@pytest.fixture(autouse=True)
def nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget a likelihood that an example registers, and keep the files of metrics out of the user's cache."""
    monkeypatch.setattr(registry, "LIKELIHOODS", dict(registry.LIKELIHOODS))
    monkeypatch.setattr("evaluate.config.HF_METRICS_CACHE", str(tmp_path))


def test_the_package_shows_its_examples() -> None:
    assert {"hf_bayes", "hf_bayes.metrics.evaluate_metrics", "hf_bayes.uncertainty.custom.base"} <= set(MODULES)


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_print_what_they_show(name: str) -> None:
    results = doctest.testmod(importlib.import_module(name), optionflags=FLAGS)
    assert results.attempted
    assert not results.failed
