"""The diagram and the table of docs/architecture.md are those of the import contract; a class has a name of its own."""

from __future__ import annotations

import ast
import re
import tomllib
from collections import Counter
from itertools import pairwise, product
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]

Arrow = tuple[str, str]


def contract() -> list[list[str]]:
    """Return the layers of the import contract, the highest first."""
    (layers,) = (entry["layers"] for entry in CONTRACTS if entry["type"] == "layers")
    return [re.split(r" *[:|] *", layer) for layer in layers]


def arrows_of(page: str) -> set[Arrow]:
    """Return the arrows of the page's diagram: ``a & b --> c`` is (a, c) and (b, c)."""
    (diagram,) = re.findall(r"^```mermaid\nflowchart TD\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE)
    ends = [[side.split(" & ") for side in line.split(" --> ")] for line in map(str.strip, diagram.splitlines())]
    return {arrow for upper, lower in ends for arrow in product(upper, lower)}


def mismatches(page: str, layers: list[list[str]]) -> set[str]:
    """Return what the page and the contract do not agree on."""
    drawn = arrows_of(page)
    allowed = {arrow for upper, lower in pairwise(layers) for arrow in product(upper, lower)}
    packages = {package for layer in layers for package in layer}
    in_table = set(re.findall(r"^\| `(\w+)` \| [^|]+ \|$", page, flags=re.MULTILINE))
    return (
        {" --> ".join(arrow) for arrow in drawn ^ allowed} | ({end for arrow in drawn for end in arrow} ^ packages)
    ) | (in_table ^ packages)


def test_the_diagram_and_the_table_are_the_contract() -> None:
    assert not mismatches(PAGE, contract())


def test_the_contract_holds_every_package() -> None:
    folders = {path.parent.name for path in (ROOT / "hf_bayes").glob("*/__init__.py")}
    assert {package for layer in contract() for package in layer} == folders


@pytest.mark.parametrize(
    ("drawn", "instead"),
    [
        ("    chains --> methods\n", ""),
        ("    chains --> methods\n", "    chains --> methods & core\n"),
        ("    chains --> methods\n", "    methods --> chains\n"),
        ("    models --> metrics & posteriors", "    models --> metric & posteriors"),
        ("| `chains` | `Run`, ", "| `sampling` | `Run`, "),
    ],
    ids=["arrow missing", "arrow added", "arrow turned", "package renamed", "row renamed"],
)
def test_a_change_of_the_page_alone_is_caught(drawn: str, instead: str) -> None:
    assert PAGE.count(drawn) == 1
    assert mismatches(PAGE.replace(drawn, instead), contract())


def test_a_change_of_the_contract_alone_is_caught() -> None:
    layers = contract()
    assert mismatches(PAGE, layers[1:])
    assert mismatches(PAGE, [*layers[:1], ["serving"], *layers[1:]])
    assert mismatches(PAGE, [layers[1], layers[0], *layers[2:]])


def repeated_classes(folder: Path) -> set[str]:
    """Return the names that more than one class under a folder has."""
    nodes = [node for path in folder.rglob("*.py") for node in ast.parse(path.read_text(encoding="utf-8")).body]
    counts = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    return {name for name, count in counts.items() if count > 1}


def test_every_class_has_a_name_of_its_own() -> None:
    assert not repeated_classes(ROOT / "hf_bayes")


def test_a_name_of_two_classes_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("class Pass: pass\nclass Draw: pass\n")
    (tmp_path / "b.py").write_text("class Pass: pass\n")
    assert repeated_classes(tmp_path) == {"Pass"}


LARGEST_DEPTH = 3
"""A base, a family, a member: MethodConfig, LangevinConfig, SGLDConfig."""

NOT_COUNTED = {"HostMethods"}
"""It is a part of BayesianModel: what transformers and torch call. They look these methods up on the model itself, so
no other object can hold them, and with them ``models/base.py`` would have more than 400 lines."""


def depths(folder: Path, not_counted: set[str]) -> dict[str, int]:
    """Return the depth of each class under a folder: 1 if it has no base class from this folder."""
    nodes = [node for path in folder.rglob("*.py") for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    bases = {node.name: list(map(base_name, node.bases)) for node in nodes if isinstance(node, ast.ClassDef)}

    def depth(name: str) -> int:
        above = max((depth(base) for base in bases[name] if base in bases), default=0)
        return above + (name not in not_counted)

    return {name: depth(name) for name in bases}


def base_name(base: ast.expr) -> str:
    """Return the name of a base class, which may be generic (``Base[T]``) or in a module (``module.Base``)."""
    base = base.value if isinstance(base, ast.Subscript) else base
    return base.attr if isinstance(base, ast.Attribute) else ast.unparse(base)


def test_no_class_is_more_than_three_deep() -> None:
    assert not {name: depth for name, depth in depths(ROOT / "hf_bayes", NOT_COUNTED).items() if depth > LARGEST_DEPTH}


def test_every_class_that_is_not_counted_is_needed() -> None:
    for name in NOT_COUNTED:
        assert max(depths(ROOT / "hf_bayes", NOT_COUNTED - {name}).values()) > LARGEST_DEPTH


def test_depth_counts_own_classes_only(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("class Base(Module, ABC): pass\nclass Family(Base[T]): pass\n")
    (tmp_path / "b.py").write_text("class Method(Protocol, a.Family): pass\nclass Other(Method): pass\n")
    assert depths(tmp_path, set()) == {"Base": 1, "Family": 2, "Method": 3, "Other": 4}
    assert depths(tmp_path, {"Base"}) == {"Base": 0, "Family": 1, "Method": 2, "Other": 3}
