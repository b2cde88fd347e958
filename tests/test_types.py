"""The type checker reads the package strictly: slips that are planted in a copy of it are found, and nothing else."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SLIPS = ("self.call_of_an_undefined_method()", "self.misspeled_attribute")
PLACES = {
    "trainer": ("hf_bayes/training/trainer.py", "BayesianTrainerMixin"),
    "model": ("hf_bayes/models/causal_lm.py", "BayesianModelForCausalLM"),
    "sampler": ("hf_bayes/methods/sgmcmc/sghmc.py", "SGHMCConfig"),
}
"""{what: (file, class)}: the slips open the first method of the class."""

WRONG_ARGUMENT = ("model", "self.check_core(7)")
"""A call with an argument of another type, which stands beside the slips of this place."""

STATE = ("hf_bayes/methods/sgmcmc/sghmc.py", "update", "{}.misspeled_momentum")
"""A misspelled attribute of the sampler's state opens the first function of this name; {} is its first parameter."""


def plant(file: Path, function: ast.FunctionDef, slips: Iterable[str]) -> None:
    """Insert lines before the first statement of a function, after its docstring."""
    first = function.body[1] if ast.get_docstring(function) and len(function.body) > 1 else function.body[0]
    lines = file.read_text("utf-8").splitlines(keepends=True)
    at = min([first.lineno, *(d.lineno for d in getattr(first, "decorator_list", ()))]) - 1
    lines[at:at] = [" " * first.col_offset + slip + "\n" for slip in slips]
    file.write_text("".join(lines), encoding="utf-8")


def first_method(file: Path, name: str) -> ast.FunctionDef:
    """Return the first method of a class that has ``self``."""
    (owner,) = (n for n in ast.parse(file.read_text("utf-8")).body if isinstance(n, ast.ClassDef) and n.name == name)
    methods = (node for node in owner.body if isinstance(node, ast.FunctionDef))
    return next(method for method in methods if method.args.args and method.args.args[0].arg == "self")


def first_function(file: Path, name: str) -> ast.FunctionDef:
    """Return the first function of this name, however deep it stands."""
    nodes = ast.walk(ast.parse(file.read_text("utf-8")))
    return next(node for node in nodes if isinstance(node, ast.FunctionDef) and node.name == name)


class Findings:
    """The errors of one run of mypy: the lines of source that they name."""

    def __init__(self, copy: Path, output: str) -> None:
        self.output = output
        self.lines: dict[str, list[str]] = {}
        for file, line in re.findall(r"^([^:\n]+\.py):(\d+): error: ", output, flags=re.MULTILINE):
            source = (copy / file).read_text("utf-8").splitlines()
            self.lines.setdefault(file, []).append(source[int(line) - 1].strip())


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> Findings:
    """One run over a copy of the package with every slip in it, and over a copy of the cache of ``make lint``."""
    copy = tmp_path_factory.mktemp("types")
    shutil.copytree(ROOT / "hf_bayes", copy / "hf_bayes", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", copy)
    if (ROOT / ".mypy_cache").is_dir():
        shutil.copytree(ROOT / ".mypy_cache", copy / ".mypy_cache")
    file, function, slip = STATE
    update = first_function(copy / file, function)
    plant(copy / file, update, [slip.format(update.args.args[0].arg)])
    for what, (file, name) in PLACES.items():
        wrong = [WRONG_ARGUMENT[1]] if what == WRONG_ARGUMENT[0] else []
        plant(copy / file, first_method(copy / file, name), [*SLIPS, *wrong])
    done = subprocess.run([sys.executable, "-m", "mypy"], cwd=copy, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout[-3000:] + done.stderr  # 2: it did not run to its end
    return Findings(copy, done.stdout)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("slip", SLIPS, ids=["method", "attribute"])
@pytest.mark.parametrize("what", ["trainer", "model", "sampler"])
def test_the_type_checker_finds_a_slip(what: str, slip: str, findings: Findings) -> None:
    file, _ = PLACES[what]
    assert slip in findings.lines.get(file, []), findings.output


@pytest.mark.timeout(600)
def test_the_type_checker_finds_an_argument_of_a_wrong_type(findings: Findings) -> None:
    what, call = WRONG_ARGUMENT
    file, _ = PLACES[what]
    assert call in findings.lines.get(file, []), findings.output
    assert re.search(rf"^{re.escape(file)}:\d+: error: .*\[arg-type\]$", findings.output, re.MULTILINE)


@pytest.mark.timeout(600)
def test_the_type_checker_finds_a_slip_in_a_samplers_state(findings: Findings) -> None:
    file, _, _ = STATE
    assert any(".misspeled_momentum" in line for line in findings.lines.get(file, [])), findings.output


@pytest.mark.timeout(600)
def test_the_type_checker_finds_nothing_but_the_slips(findings: Findings) -> None:
    found = {line for lines in findings.lines.values() for line in lines}
    others = {line for line in found - {*SLIPS, WRONG_ARGUMENT[1]} if ".misspeled_momentum" not in line}
    assert others == set(), findings.output
