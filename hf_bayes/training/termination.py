"""The checkpoint of a run that is asked to end by SIGTERM (``enable_jit_checkpoint``)."""

from __future__ import annotations

from typing import Any

from transformers import Trainer
from transformers.trainer_jit_checkpoint import CheckpointManager, JITCheckpointCallback

from hf_bayes.members.mesh import ChainMesh


class CheckpointOnTermination(JITCheckpointCallback):
    """Save at the end of the update in which SIGTERM was noticed, and end the run after that.

    transformers' callback also saves within an update. There the chains have moved and Trainer has not counted the
    update, or its rows have been drawn already: a resumed run would make the update twice, or on other rows.

    Args:
        requests: the object that handles the signal.
        mesh: the processes, which write a checkpoint together.
    """

    def __init__(self, requests: CheckpointManager, mesh: ChainMesh) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.jit_manager: CheckpointManager = requests
        self._mesh = mesh

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Wait for the end of the update."""

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Wait for the end of the update."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Ask Trainer for a checkpoint, which it writes after the logs and the evaluation of this update."""
        # a process may notice the signal an update later than another one
        if any(self._mesh.share(self.jit_manager.is_checkpoint_requested)):
            self.jit_manager.is_checkpoint_requested = control.should_save = True

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        """Do nothing: an epoch ends with the end of an update."""

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End the run if this checkpoint was asked for."""
        if self.jit_manager.is_checkpoint_requested:
            self.jit_manager.is_checkpoint_requested, control.should_training_stop = False, True


def save_at_the_end_of_updates(trainer: Trainer, mesh: ChainMesh) -> None:
    """Replace transformers' callback for ``enable_jit_checkpoint``, if the trainer has it, by the one of this module.

    Args:
        trainer: the host trainer, whose ``__init__`` has ended.
        mesh: the processes.
    """
    theirs = trainer.pop_callback(JITCheckpointCallback)
    if isinstance(theirs, JITCheckpointCallback) and theirs.jit_manager is not None:
        trainer.add_callback(CheckpointOnTermination(theirs.jit_manager, mesh))
