from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import TrainerCallback, TrainerControl
from transformers.trainer_jit_checkpoint import JITCheckpointCallback

from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from hf_bayes.training.termination import CheckpointOnTermination
from tests import runs
from tests.training.test_private_hooks import collate

PLACES = ("on_step_begin", "on_pre_optimizer_step", "on_step_end")


@pytest.fixture(autouse=True)
def own_handler() -> Iterator[None]:
    """Put the handler of SIGTERM back, which a trainer that never ends its training keeps."""
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


def jit_callback(trainer: Any) -> Any:
    (found,) = (each for each in trainer.callback_handler.callbacks if isinstance(each, JITCheckpointCallback))
    return found


def asking(trainer: Any, place: str, update: int) -> TrainerCallback:
    """Return a callback that asks for the checkpoint as SIGTERM does, in one of the places within an update."""

    def ask(_: Any, args: Any, state: Any, control: Any, **__: Any) -> None:
        if state.global_step == update:
            jit_callback(trainer).jit_manager.is_checkpoint_requested = True

    return type("Asking", (TrainerCallback,), {place: ask})()


def run(folder: Path, **changes: Any) -> Any:
    """A run of ten updates, whose collator draws from all global generators."""
    torch.manual_seed(8)
    method = SGHMCConfig(num_chains=2, draws_per_chain=2, temperature=0.01)
    settings = {"max_steps": 10, "save_strategy": "steps", "save_steps": 1000, "enable_jit_checkpoint": True}
    settings |= changes
    return runs.trainer(folder, method, collator=collate, logging_steps=2, **settings)


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("place", PLACES)
def test_a_run_that_sigterm_ended_resumes_bitwise(tmp_path, place) -> None:
    whole = run(tmp_path / "whole")
    whole.train()
    ended = run(tmp_path / "ended")
    ended.callback_handler.callbacks.insert(0, asking(ended, place, 4 if place == "on_step_end" else 3))
    ended.train()
    assert [path.name for path in (tmp_path / "ended").glob("checkpoint-*")] == ["checkpoint-4"]
    assert ended.state.global_step == ended.run.num_updates == 4
    resumed = run(tmp_path / "ended")
    resumed.train(resume_from_checkpoint=True)
    assert runs.equal(resumed.posterior.approximation, whole.posterior.approximation)
    assert losses(resumed) == losses(whole)


def test_a_second_run_handles_sigterm_without_an_old_request(tmp_path) -> None:
    trainer = run(tmp_path)
    trainer.callback_handler.callbacks.insert(0, asking(trainer, "on_step_end", 10))
    trainer.train()
    manager = jit_callback(trainer).jit_manager
    assert not manager.is_checkpoint_requested
    assert signal.getsignal(signal.SIGTERM) != manager._sigterm_handler
    handlers: list[Any] = []
    note = {"on_step_end": lambda *_, **__: handlers.append(signal.getsignal(signal.SIGTERM))}
    trainer.callback_handler.callbacks[0] = type("Noting", (TrainerCallback,), note)()
    trainer.train()
    assert handlers == 10 * [manager._sigterm_handler]


def test_an_evaluation_that_is_due_takes_no_checkpoint_away(tmp_path) -> None:
    changes = {"save_strategy": "best", "metric_for_best_model": "nll", "eval_strategy": "steps", "eval_steps": 1}
    trainer = run(tmp_path, eval_dataset=runs.token_rows(4), **changes)
    trainer.callback_handler.callbacks.insert(0, asking(trainer, "on_step_begin", 3))
    trainer.train()
    assert trainer.state.global_step == 4
    assert (tmp_path / "checkpoint-4").exists()


def test_processes_end_at_the_same_update() -> None:
    """Requests reach two processes between two updates, one of them while a usual checkpoint is written."""
    managers = [SimpleNamespace(is_checkpoint_requested=False) for _ in range(2)]
    mesh: Any = SimpleNamespace(share=lambda _: [each.is_checkpoint_requested for each in managers])
    callbacks = [CheckpointOnTermination(manager, mesh) for manager in managers]  # type: ignore[arg-type]

    def controls_after(hook: str) -> list[TrainerControl]:
        controls = [TrainerControl(should_evaluate=True) for _ in callbacks]
        for callback, control in zip(callbacks, controls, strict=True):
            getattr(callback, hook)(None, None, control)
        return controls

    assert not any(control.should_save for control in controls_after("on_step_end"))
    managers[0].is_checkpoint_requested = True
    assert not any(control.should_training_stop for control in controls_after("on_save"))
    assert all(control.should_save and not control.should_evaluate for control in controls_after("on_step_end"))
    assert all(control.should_training_stop for control in controls_after("on_save"))


def test_the_callback_of_transformers_is_replaced(tmp_path) -> None:
    callbacks = run(tmp_path).callback_handler.callbacks
    found = [each for each in callbacks if isinstance(each, JITCheckpointCallback)]
    assert [type(each) for each in found] == [CheckpointOnTermination]
    assert found[0].jit_manager.trainer is not None


def test_no_callback_without_enable_jit_checkpoint(tmp_path) -> None:
    callbacks = runs.trainer(tmp_path, SGHMCConfig(num_chains=2)).callback_handler.callbacks
    assert not any(isinstance(each, JITCheckpointCallback) for each in callbacks)
