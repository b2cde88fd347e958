"""The private hooks of Trainer have, in the installed version, the parameters that we rely on."""

from __future__ import annotations

import ast
import inspect
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from accelerate import Accelerator
from torch import nn
from transformers import Trainer

import hf_bayes.training as package
from hf_bayes.training.arguments import BayesianTrainingArguments
from hf_bayes.training.compat import (
    ATTRIBUTES,
    BATCH_NORM,
    CALLED,
    DROPOUT,
    OVERRIDDEN,
    REFUSED,
    TrainerHost,
    expected_updates,
    logger,
    without_data_parallel,
)
from hf_bayes.training.private_hooks import PrivateHooks
from hf_bayes.training.trainer import BayesianTrainerMixin

FOLDER = Path(package.__path__[0])


@pytest.mark.parametrize(("name", "parameters"), [*OVERRIDDEN.items(), *CALLED.items(), *REFUSED.items()], ids=str)
def test_trainer_has_a_hook_with_these_parameters(name: str, parameters: tuple[str, ...]) -> None:
    found = tuple(inspect.signature(getattr(Trainer, name)).parameters)
    assert found[: len(parameters)] == parameters


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
    for file in FOLDER.rglob("*.py"):
        if file.name != "compat.py":
            assert not private_reads(file) & hooks, file.name
    assert private_reads(FOLDER / "compat.py") >= hooks  # the search finds them where they are


def test_private_names_of_hosts_are_imported_in_compat_only() -> None:
    found = {
        file.name
        for file in FOLDER.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.ImportFrom) and not (node.module or "").startswith(("__future__", "hf_bayes"))
        if any(name.startswith("_") for name in [*(node.module or "").split("."), *(a.name for a in node.names)])
    }
    assert found == {"compat.py"}


def test_every_override_takes_what_trainer_passes() -> None:
    for name, ours in {**vars(PrivateHooks), **vars(BayesianTrainerMixin)}.items():
        stock = getattr(Trainer, name, None)
        if name.startswith("__") or not callable(stock) or not inspect.isfunction(ours):
            continue
        own = inspect.signature(ours).parameters
        kinds = {parameter.kind for parameter in own.values()}
        takes_all = inspect.Parameter.VAR_KEYWORD in kinds or inspect.Parameter.VAR_POSITIONAL in kinds
        for parameter in inspect.signature(stock).parameters:
            assert takes_all or parameter in own, f"{name} lacks {parameter}"


def host_of(*, disable_tqdm: bool = False, first: bool = True) -> TrainerHost:
    trainer: Any = SimpleNamespace(args=SimpleNamespace(disable_tqdm=disable_tqdm), is_world_process_zero=lambda: first)
    return TrainerHost(trainer)


@pytest.mark.parametrize(
    ("given", "expected"),
    [(None, {"": None}), ([1], {"": [1]}), ({"a": [1], "heldout": [2]}, {"a": [1], "heldout": [2]})],
)
def test_held_out_sets_have_names_and_a_single_one_has_none(given: Any, expected: dict[str, Any]) -> None:
    trainer: Any = SimpleNamespace(eval_dataset=given)
    assert TrainerHost(trainer).eval_sets == expected


@pytest.mark.parametrize(
    ("level", "disable_tqdm", "first", "where"),
    [
        (logging.INFO, False, True, "log"),
        (logging.WARNING, False, True, "bar"),
        (logging.WARNING, True, True, ""),
        (logging.WARNING, False, False, ""),
    ],
)
def test_a_message_is_shown_in_the_log_or_beside_the_bar(
    level: int,
    disable_tqdm: bool,
    first: bool,
    where: str,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with caplog.at_level(level, logger=logger.name):
        host_of(disable_tqdm=disable_tqdm, first=first).say("%d chains", 3)
    assert caplog.messages == (["3 chains"] if where == "log" else [])
    assert capsys.readouterr().err == ("3 chains\n" if where == "bar" else "")


@pytest.mark.parametrize("first", [True, False])
def test_the_first_process_alone_warns(first: bool, caplog: pytest.LogCaptureFixture) -> None:
    host_of(first=first).warn("R-hat %.1f", 1.3)
    assert caplog.messages == (["R-hat 1.3"] if first else [])


def test_no_model_is_wrapped_in_data_parallel() -> None:
    accelerator, seen = Accelerator(cpu=True), []

    def prepare_model(model: Any, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
        seen.append((model, device_placement, evaluation_mode))
        return model

    accelerator.prepare_model = prepare_model
    without_data_parallel(accelerator)
    model = nn.Linear(1, 1)
    assert accelerator.prepare_model(model, False) is model
    assert seen == [(model, False, True)]  # accelerate wraps no model that is prepared for evaluation


@pytest.mark.parametrize(
    ("rows", "changes"),
    [
        (range(21), {"num_train_epochs": 2.5, "per_device_train_batch_size": 4}),
        (range(21), {"num_train_epochs": 3, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}),
        (range(21), {"max_steps": 7}),
    ],
)
def test_expected_updates_are_those_of_trainer(tmp_path: Path, rows: Any, changes: dict[str, Any]) -> None:
    args = BayesianTrainingArguments(output_dir=str(tmp_path), **changes)
    host = Trainer(nn.Linear(1, 1), args, train_dataset=list(rows))
    planned = host.set_initial_training_values(args, host.get_train_dataloader())
    assert expected_updates(args, rows) == planned[-1]
    assert expected_updates(None, rows) is None
    if args.max_steps < 0:
        assert expected_updates(args, iter(rows)) is None
