"""Our classes override the private names that the lists call overridden, and only compat modules read listed names."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

import hf_bayes
from hf_bayes.members.compat import lm_eval, transformers_names
from hf_bayes.metrics.evaluate_metrics import NLL
from hf_bayes.models.attaching import MODELS
from hf_bayes.pipelines.factory import _PIPELINES
from hf_bayes.pipelines.registration import RegisteredPipeline
from hf_bayes.training.trainer import BayesianTrainer
from tests.host_names import found_at
from tests.private_names import compat_modules, is_private, lists_of

PACKAGE = Path(hf_bayes.__file__).parent
COMPAT = compat_modules(PACKAGE)
NAMES = [entry for names in lists_of(PACKAGE).values() for entry in names if is_private(entry.name)]
OVERRIDDEN = [entry for entry in NAMES if entry.use in ("overridden", "provided")]
INSTALLED = [entry for entry in OVERRIDDEN if entry not in lm_eval.NAMES]  # see members/compat/test_lm_eval.py
OURS = {"_asdict", "_fields", "_replace", "_restoration"}
"""Names with an underscore that are Python's or this package's own."""


def our_classes() -> list[type]:
    tops = (*MODELS.values(), *_PIPELINES, RegisteredPipeline, BayesianTrainer, NLL)
    kinds = {kind for top in tops for kind in top.__mro__}
    return [kind for kind in kinds if kind.__module__.startswith("hf_bayes.")]


def test_every_override_of_a_private_name_is_in_the_list() -> None:
    names = {entry.name for entry in INSTALLED}
    hosts = [found_at(owner) for owner in {entry.owner for entry in INSTALLED}]
    overridden = {
        name
        for kind in our_classes()
        for name in vars(kind)
        if name.startswith("_") and not name.startswith("__") and any(hasattr(host, name) for host in hosts)
    }
    assert overridden - names - {"_abc_impl", "_is_protocol"} == set()
    assert names - overridden == {entry.name for entry in INSTALLED if entry.use == "provided"} == {"_reorder_cache"}
    assert all("_reorder_cache" in dir(MODELS[task]) for task in ("causal_lm", "image_text_to_text"))


def test_every_override_takes_what_the_host_passes() -> None:
    kinds = inspect.Parameter
    for entry in OVERRIDDEN:
        if entry.owner == "transformers.Pipeline":  # each pipeline of transformers has parameters of its own
            continue
        if entry.parameters is None:
            continue
        for own in (vars(kind)[entry.name] for kind in our_classes() if entry.name in vars(kind)):
            taken = inspect.signature(own).parameters
            collects = {parameter.kind for parameter in taken.values()} & {kinds.VAR_KEYWORD, kinds.VAR_POSITIONAL}
            assert collects or set(entry.parameters) <= set(taken), entry.name


def private_reads(file: Path) -> Iterator[str]:
    """Names with an underscore that a file reads of something other than ``self``, or as text in ``getattr``."""
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.Attribute):
            owner, name = ast.unparse(node.value), node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr") and len(node.args) > 1:
            owner, name = "", ast.literal_eval(node.args[1]) if isinstance(node.args[1], ast.Constant) else ""
        else:
            continue
        if name.startswith("_") and not name.startswith("__") and owner not in ("self", "cls", "super()"):
            yield name


@pytest.mark.parametrize("package", ["models", "pipelines"])
def test_other_files_read_no_private_name_of_a_host(package: str) -> None:
    names = {entry.name for entry in OVERRIDDEN if entry.parameters is not None or entry.use == "provided"}
    for file in sorted((PACKAGE / package).rglob("*.py")):
        assert set(private_reads(file)) - OURS - names == set(), file.name


def test_only_the_compat_modules_read_the_names_that_are_read() -> None:
    names = {entry.name for entry in NAMES if entry.use in ("called", "read", "replaced")}
    readers: dict[str, set[str]] = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        for name in names & set(private_reads(file)):
            readers.setdefault(name, set()).add(file.relative_to(PACKAGE).as_posix())
    assert set().union(*readers.values()) <= COMPAT.keys()
    hooks = {entry.name for entry in transformers_names.NAMES
             if entry.owner == "transformers.Trainer" and entry.use in ("called", "replaced")
             and is_private(entry.name)}  # fmt: skip
    assert hooks <= readers.keys()  # the search finds them where they are
