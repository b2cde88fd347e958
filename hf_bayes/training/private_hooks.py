"""The private hooks of Trainer that a Bayesian trainer overrides.

``members.compat.transformers`` lists their parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints

from hf_bayes.members.compat.transformers import output_dir_of
from hf_bayes.members.mesh import ChainMesh
from hf_bayes.training import checkpoints
from hf_bayes.training.diagnosis import Diagnosis
from hf_bayes.training.session import required
from hf_bayes.training.setup import Setup

if TYPE_CHECKING:
    from transformers import Trainer as _Host
else:  # whichever class follows in the order of resolution: TRL's, a user's own
    _Host = object


class PrivateHooks(_Host):
    """The hooks with which Trainer writes and reads checkpoints, and measures gradients.

    Attributes:
        setup: the settings that do not change after construction.
        diagnosis: the diagnostics of the last run, with its checkpoints; None before ``train``.
        resumed_from: a checkpoint whose states of generators are still to be loaded; None if there is none.
    """

    setup: Setup
    diagnosis: Diagnosis | None = None
    resumed_from: str | None = None

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        with sealed_checkpoint(self, trial, group=self.setup.mesh):
            super()._save_checkpoint(model, trial)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        checkpoints.begin(output_dir, group=self.setup.mesh)
        super()._save_optimizer_and_scheduler(output_dir)
        required(self.diagnosis).checkpoints.save(output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Load no weights: ``begin`` has checked the same checkpoint, and the chains are loaded below."""
        required(self.diagnosis)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            required(self.diagnosis).checkpoints.load(checkpoint)  # checks the files that Trainer then unpickles
        super()._load_optimizer_and_scheduler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Load the states of the generators once.

        In the middle of an epoch Trainer does so after it has fetched the rows of the first update. A collator that
        draws random numbers needs them before (``restore_generators``).
        """
        if self.resumed_from is not None:
            self.resumed_from = None
            super()._load_rng_state(checkpoint)

    def restore_generators(self, update: int) -> None:
        """Load the states of the generators, if this is the first update after the checkpoint.

        Args:
            update: the number of the update, from 0, whose rows are read next.
        """
        if update == self.state.global_step:
            self._load_rng_state(self.resumed_from)

    def _get_grad_norm(self, model: nn.Module, grad_norm: float | None = None) -> None:
        """Return None: the norm over all chains together means nothing, and theta holds no gradient."""


@contextmanager
def sealed_checkpoint(trainer: _Host, trial: Any, *, group: ChainMesh) -> Iterator[None]:
    """Seal the checkpoint that Trainer writes in the block, and only then remove older ones."""
    args, run_dir = trainer.args, output_dir_of(trainer, trial)
    limit, args.save_total_limit = args.save_total_limit, None
    try:
        yield
    finally:
        args.save_total_limit = limit
    folder = Path(run_dir) / f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}"
    checkpoints.seal_checkpoint(folder, group=group)
    if args.should_save:
        best = trainer.state.best_model_checkpoint
        rotate_checkpoints(run_dir, save_total_limit=limit, best_model_checkpoint=best, use_mtime=True)
