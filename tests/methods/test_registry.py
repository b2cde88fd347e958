"""Every registered method: its place in the tables, and its config by its name."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hf_bayes
import hf_bayes.methods.registry
from hf_bayes.core.types import Kernel, Rule
from hf_bayes.distributions.approximations import Gaussian
from hf_bayes.methods.assembly import assemble
from hf_bayes.methods.registry import METHODS, from_dict, names_with
from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from tests.methods.conformance import (
    ROWS,
    Row,
    on_energies,
    problem,
    run,
    starts,
)

REPOSITORY = Path(__file__).parents[2]


# -- adding a method touches five places, no more


def test_every_method_has_a_row_in_the_conformance_table() -> None:
    assert list(ROWS) == list(METHODS)
    assert all(type(ROWS[name].config) is config for name, config in METHODS.items())


@pytest.mark.parametrize("name", METHODS)
def test_a_method_is_one_file_whose_config_carries_its_name(name: str) -> None:
    config = METHODS[name]
    assert config.name == name
    assert Path(inspect.getfile(config)).stem == name
    assert [other for other in METHODS.values() if inspect.getfile(other) == inspect.getfile(config)] == [config]


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_a_row_in_the_paper_index(name: str) -> None:
    module = Path(inspect.getfile(METHODS[name])).relative_to(REPOSITORY / "hf_bayes")
    index = (REPOSITORY / "docs" / "paper_index.md").read_text(encoding="utf-8")
    lines = [line for line in index.splitlines() if line.startswith("|") and f"`{name}`" in line]
    assert any(module.as_posix() in line for line in lines), f"no row with `{name}` and {module.as_posix()}"


def imported_modules(path: Path) -> Iterator[str]:
    text = path.read_text(encoding="utf-8")
    if "hf_bayes.methods" not in text:  # the name of every method's module begins so, and parsing all files takes long
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_only_the_registry_and_other_methods_import_a_method() -> None:
    package = Path(hf_bayes.__file__).parent
    method_files = {Path(inspect.getfile(config)) for config in METHODS.values()}
    method_modules = {config.__module__ for config in METHODS.values()}
    importers = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if path not in method_files and method_modules & set(imported_modules(path))
    }
    assert importers == {"__init__.py", "methods/assembly.py", "methods/registry.py"}  # __init__.py: public names


ORDINARY_WORDS = "map", "ensemble", "penalty", "snapshot"
"""Names that are also words of English or of statistics (a map, a MAP estimate). They count in comparisons only."""

NAMED = re.compile(
    rf"(?<![a-z0-9])({'|'.join(name.replace('_', '[_ -]') for name in METHODS if name not in ORDINARY_WORDS)}"
    rf"|deep ensembles?|{'|'.join(kind.__name__ for kind in METHODS.values())})(?![a-z0-9])",
    re.IGNORECASE,
)

PAGE = re.compile(r"docs/\w+\.md")

EXCUSED = {
    "methods/": "the methods",
    "fit/": "each post-hoc fit makes one method",
    "__init__.py": "the table of public names",
    "cli/arguments.py": "help of --method",
    "cli/commands/bayesianise.py": "the command of one post-hoc fit",
    "cli/continual_arguments.py": "the rows of a paper's table, and their help",
    "posteriors/model_card_explanations.py": "the card's text on each method",
    "training/tuning/candidates.py": "the candidates of tuning, and their labels",
}

OTHER_MEANINGS = {
    ("core/config.py", "laplace"): "a prior, the double exponential",
    ("distributions/priors.py", "laplace"): "a prior, the double exponential",
    ("posteriors/card_results.py", "map"): "the prefix of metrics of a MAP estimate, such as map_nll",
}


def named_methods(source: str) -> list[str]:
    """Return the methods that string constants name, without docstrings, and those that the code compares with."""
    tree = ast.parse(source)
    documents = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    constants = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in documents]
    texts = [PAGE.sub("", node.value) for node in constants if isinstance(node.value, str)]
    operands: list[ast.AST] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            operands += [node.left, *node.comparators]
        elif isinstance(node, ast.MatchValue):
            operands.append(node.value)
    elements = [element for operand in operands for element in getattr(operand, "elts", [operand])]
    compared = [element.value for element in elements if isinstance(element, ast.Constant)]
    return [name for text in texts for name in NAMED.findall(text)] + [
        each for each in compared if each in ORDINARY_WORDS
    ]


def test_only_methods_and_their_lists_name_a_method() -> None:
    package = Path(hf_bayes.__file__).parent
    found: dict[str, set[str]] = {}
    for path in package.rglob("*.py"):
        place = path.relative_to(package).as_posix()
        names = named_methods(path.read_text(encoding="utf-8"))
        found[place] = {name for name in names if (place, name) not in OTHER_MEANINGS}
    excused = {place: names for place, names in found.items() if place.startswith(tuple(EXCUSED))}
    assert not {place: names for place, names in found.items() if names and place not in excused}
    assert all(any(names for place, names in excused.items() if place.startswith(part)) for part in EXCUSED)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('raise ValueError(f"{name} fails: use SGHMCConfig(...)")', ["SGHMCConfig"]),
        ('message = "fit SWAG, or call fit_laplace"', ["SWAG", "laplace"]),
        ('advice = "a deep ensemble, or mean-field inference"', ["deep ensemble", "mean-field"]),
        ('wanted = config.name == "map"', ["map"]),
        ('wanted = config.name in ("map", "swag")', ["swag", "map"]),
        ('match name:\n    case "snapshot":\n        pass', ["snapshot"]),
        ('def fit() -> None:\n    """Fit SWAG."""', []),
        ('message = "a map of one MAP estimate per ensemble (docs/laplace.md)"', []),
    ],
)
def test_a_text_that_names_a_method_is_found(source: str, expected: list[str]) -> None:
    assert named_methods(source) == expected


@on_energies
def test_methods_that_end_in_gaussians_say_so(row: Row) -> None:
    is_gaussian = isinstance(run(row, starts(2, 3)).approximation, Gaussian)
    assert row.config.requirements.ends_in_gaussian == is_gaussian


def test_rules_and_kernels_are_all_there_is() -> None:
    for row in ROWS.values():
        assert isinstance(assemble(row.config, problem()), Rule | Kernel)


def test_a_message_names_three_methods_and_where_all_are() -> None:
    first = ", ".join(list(METHODS)[:3])
    assert names_with(lambda needs: True) == f"such as {first}; hf_bayes.METHODS has all methods"
    assert names_with(lambda needs: needs.allows_private_rows) == "penalty"
    assert hf_bayes.METHODS is METHODS


# -- building by name and config


@pytest.mark.parametrize("values", [{}, {"name": "sghcm"}, {"name": None}, {"name": ["sghmc"]}])
def test_an_unknown_name_is_refused_with_the_names_there_are(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"unknown method .*the methods are {', '.join(sorted(METHODS))}"):
        from_dict(values)


def test_from_dict_adds_defaults_and_changes_no_argument() -> None:
    values = {"name": "sghmc", "momentum": 0.5}
    assert from_dict(values) == SGHMCConfig(momentum=0.5)
    assert values == {"name": "sghmc", "momentum": 0.5}
