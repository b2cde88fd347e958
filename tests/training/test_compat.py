"""The private hooks of Trainer have, in the installed version, the parameters that we rely on."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest
from torch import nn
from transformers import Trainer

import hf_bayes.training as package
from hf_bayes.training.compat import ATTRIBUTES, BATCH_NORM, CALLED, DROPOUT, OVERRIDDEN
from hf_bayes.training.trainer import BayesianTrainerMixin

FOLDER = Path(package.__path__[0])


@pytest.mark.parametrize(("name", "parameters"), [*OVERRIDDEN.items(), *CALLED.items()], ids=str)
def test_trainer_has_a_hook_with_these_parameters(name: str, parameters: tuple[str, ...]) -> None:
    found = tuple(inspect.signature(getattr(Trainer, name)).parameters)
    assert found[: len(parameters)] == parameters


def test_overridden_hooks_are_listed_and_no_others() -> None:
    private = {name for name in vars(BayesianTrainerMixin) if name.startswith("_") and not name.startswith("__")}
    assert {name for name in private if hasattr(Trainer, name)} == set(OVERRIDDEN)


def test_an_override_has_the_parameters_of_its_hook() -> None:
    for name, parameters in OVERRIDDEN.items():
        assert tuple(inspect.signature(getattr(BayesianTrainerMixin, name)).parameters) == parameters


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_trainer_sets_an_attribute_that_we_read(name: str) -> None:
    assert f"self.{name} = " in inspect.getsource(Trainer)


def test_torch_s_layers_have_the_private_bases() -> None:
    assert all(issubclass(kind, BATCH_NORM) for kind in (nn.BatchNorm1d, nn.BatchNorm3d, nn.SyncBatchNorm))
    assert all(issubclass(kind, DROPOUT) for kind in (nn.Dropout, nn.Dropout2d, nn.AlphaDropout))


def private_reads(file: Path) -> set[str]:
    """Return the private names that a module reads of an object other than ``self``, ``cls`` or ``super()``."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            owner = node.value
            if not (isinstance(owner, ast.Name) and owner.id in ("self", "cls")):
                found.add(node.attr)
    return found


def test_no_other_module_reads_private_hooks_of_a_trainer() -> None:
    hooks = {name for name in CALLED if name.startswith("_")} | set(ATTRIBUTES)
    for file in FOLDER.glob("*.py"):
        if file.name != "compat.py":
            assert not private_reads(file) & hooks, file.name
    assert private_reads(FOLDER / "compat.py") >= hooks  # the search finds them where they are


def test_private_names_of_hosts_are_imported_in_compat_only() -> None:
    found = {
        file.name
        for file in FOLDER.glob("*.py")
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.ImportFrom) and not (node.module or "").startswith(("__future__", "hf_bayes"))
        if any(name.startswith("_") for name in [*(node.module or "").split("."), *(a.name for a in node.names)])
    }
    assert found == {"compat.py"}


def test_every_override_takes_what_trainer_passes() -> None:
    for name, ours in vars(BayesianTrainerMixin).items():
        stock = getattr(Trainer, name, None)
        if name.startswith("__") or not callable(stock) or not inspect.isfunction(ours):
            continue
        own = inspect.signature(ours).parameters
        kinds = {parameter.kind for parameter in own.values()}
        takes_all = inspect.Parameter.VAR_KEYWORD in kinds or inspect.Parameter.VAR_POSITIONAL in kinds
        for parameter in inspect.signature(stock).parameters:
            assert takes_all or parameter in own, f"{name} lacks {parameter}"
