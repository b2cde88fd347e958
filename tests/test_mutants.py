"""The planted faults fit the package, and the page shows what became of them. ``make mutants`` plants them."""

from __future__ import annotations

import ast
import functools
import json
import multiprocessing
from pathlib import Path

import pytest

from benchmarks.table import replaced
from tests.mutants.fault import ROOT, Fault
from tests.mutants.faults import FAULTS
from tests.mutants.run import PAGE, RECORD, Outcome, markdown, row, try_out

HARMLESS = Fault(
    "nothing at all",
    "core/rng.py",
    "digest_size=7",
    "digest_size=7  # bytes",
    ("test_mutants.py::test_a_text_that_is_gone_or_there_twice_is_told",),
)


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.name for fault in FAULTS])
def test_a_fault_can_be_planted_and_is_another_program(fault: Fault) -> None:
    source = (ROOT / "hf_bayes" / fault.file).read_text()
    assert ast.dump(ast.parse(fault.planted(source))) != ast.dump(ast.parse(source))


@functools.cache
def names_in(file: Path) -> set[str]:
    """``name`` and ``Class::name`` of the tests of a file."""
    found = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            found |= {f"{node.name}::{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
    return found


def test_every_test_that_a_fault_names_exists() -> None:
    for test in (test for fault in FAULTS for test in fault.tests):
        file, name = test.split("[")[0].split("::", 1)
        assert name in names_in(ROOT / "tests" / file), test


def test_each_fault_is_planted_once() -> None:
    assert len({fault.name for fault in FAULTS}) == len({(fault.file, fault.put) for fault in FAULTS}) == len(FAULTS)


def test_a_text_that_is_gone_or_there_twice_is_told() -> None:
    fault = Fault("a slip", "core/rng.py", "x = 1", "x = 2", ())
    for source, count in (("y = 1", 0), ("x = 1; x = 1", 2)):
        with pytest.raises(ValueError, match=rf"fault 'a slip': hf_bayes/core/rng.py holds its text {count} times"):
            fault.planted(source)


def test_a_fault_survives_unless_each_of_its_tests_fails() -> None:
    fault = Fault("a slip", "core/rng.py", "x", "y", ("test_a.py::test_one", "test_b.py::test_two[1-x]"))
    caught = Outcome(["test_a.py::test_one[3]", "test_b.py::test_two[1-x]"], [], [], 1.0)
    assert row(fault, caught)["survived"] == []
    assert row(fault, caught._replace(failed=caught.failed[:1]))["survived"] == ["test_b.py::test_two[1-x]"]
    assert row(fault, caught._replace(failed=["test_a.py::test_one_more", *caught.failed[1:]]))["survived"]
    assert row(fault, caught._replace(errors=["no such test"]))["survived"] == ["no such test"]


def test_the_page_shows_the_record_and_every_fault_is_caught() -> None:
    record, page = json.loads(RECORD.read_text()), PAGE.read_text()
    assert page == replaced(page, "mutants", markdown(record)), "run make mutants"
    kept = {found["fault"]: tuple(found["tests"]) for found in record["faults"] if not found["survived"]}
    assert kept == {fault.name: fault.tests for fault in FAULTS}, "run make mutants"


@pytest.mark.slow
def test_what_changes_nothing_survives() -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:  # where no package is imported yet
        outcome = pool.apply(try_out, (HARMLESS.tests, HARMLESS))
    assert outcome.survived(HARMLESS.tests) == list(HARMLESS.tests)
    assert (len(outcome.passed), outcome.failed, outcome.errors) == (1, [], [])
