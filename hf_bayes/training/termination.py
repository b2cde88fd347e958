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
        self._ends = False  # all processes know of the signal: ``is_checkpoint_requested`` may change at any time
        self._handles_signal = True  # transformers does so when the trainer is made

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Handle the signal again in a second run: transformers stops at the end of the first one."""
        if not self._handles_signal:
            self.jit_manager.setup_signal_handler()
            self._handles_signal = True

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Wait for the end of the update."""

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Wait for the end of the update."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Ask Trainer for a checkpoint, which it writes after the logs of this update; an evaluation takes time."""
        # a process may notice the signal an update later than another one
        self._ends = any(self._mesh.share(self.jit_manager.is_checkpoint_requested))
        if self._ends:
            control.should_save, control.should_evaluate = True, False

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        """Do nothing: an epoch ends with the end of an update."""

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End the run if this checkpoint was asked for."""
        if self._ends:
            self._ends, control.should_training_stop = False, True

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        """Forget the request, and give the signal back."""
        self.jit_manager.is_checkpoint_requested = self._handles_signal = False
        super().on_train_end(*args, **kwargs)  # type: ignore[no-untyped-call]


def save_at_the_end_of_updates(trainer: Trainer, mesh: ChainMesh) -> None:
    """Replace transformers' callback for ``enable_jit_checkpoint`` by ``CheckpointOnTermination``, if there is one.

    Args:
        trainer: the host trainer, whose ``__init__`` has ended.
        mesh: the processes.
    """
    theirs = trainer.pop_callback(JITCheckpointCallback)
    if isinstance(theirs, JITCheckpointCallback) and theirs.jit_manager is not None:
        trainer.add_callback(CheckpointOnTermination(theirs.jit_manager, mesh))
