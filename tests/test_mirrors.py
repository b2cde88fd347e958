"""Every module of the package has its tests in a file of the same name."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
TYPES = "protocols and types without behaviour of their own"
WITHOUT = {
    "chains/objective.py": TYPES,
    "cli/command.py": TYPES,
    "methods/laplace/pass_result.py": TYPES,
}
"""The modules without a file of tests, each with the reason."""


def mirror(module: Path) -> Path:
    """Return the file that tests a module, both within their folders."""
    return module.with_name(f"test_{module.name}")


def test_every_module_has_a_file_of_tests_or_a_reason() -> None:
    package, tests = ROOT / "hf_bayes", ROOT / "tests"
    modules = {path.relative_to(package) for path in package.rglob("*.py") if path.name != "__init__.py"}
    missing = {module.as_posix() for module in modules if not (tests / mirror(module)).exists()}
    assert missing == WITHOUT.keys()


def test_names_of_tests_have_at_most_60_characters() -> None:
    text = "".join(path.read_text("utf-8") for path in (ROOT / "tests").rglob("*.py"))
    names = re.findall(r"^ *def (test_\w+)", text, re.MULTILINE)
    assert names
    assert not [name for name in names if len(name) > 60]
