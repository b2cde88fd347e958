from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback
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


def asking(trainer: Any, place: str, update: int) -> TrainerCallback:
    """Return a callback that asks for the checkpoint as SIGTERM does, in one of the places within an update."""

    def ask(_: Any, args: Any, state: Any, control: Any, **__: Any) -> None:
        if state.global_step == update:
            (callback,) = (
                each for each in trainer.callback_handler.callbacks if isinstance(each, JITCheckpointCallback)
            )
            callback.jit_manager.is_checkpoint_requested = True

    return type("Asking", (TrainerCallback,), {place: ask})()


def run(folder: Path) -> Any:
    """A run of ten updates, whose collator draws from all global generators."""
    torch.manual_seed(8)
    method = SGHMCConfig(num_chains=2, draws_per_chain=2, temperature=0.01)
    settings = {"max_steps": 10, "save_strategy": "steps", "save_steps": 1000, "enable_jit_checkpoint": True}
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


def test_the_callback_of_transformers_is_replaced(tmp_path) -> None:
    callbacks = run(tmp_path).callback_handler.callbacks
    found = [each for each in callbacks if isinstance(each, JITCheckpointCallback)]
    assert [type(each) for each in found] == [CheckpointOnTermination]
    assert found[0].jit_manager.trainer is not None


def test_no_callback_without_enable_jit_checkpoint(tmp_path) -> None:
    callbacks = runs.trainer(tmp_path, SGHMCConfig(num_chains=2)).callback_handler.callbacks
    assert not any(isinstance(each, JITCheckpointCallback) for each in callbacks)
