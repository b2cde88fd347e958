"""The private hooks of Trainer that a Bayesian trainer overrides. ``compat.OVERRIDDEN`` pins their parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from hf_bayes.training import checkpoints
from hf_bayes.training.compat import sealed_checkpoint
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
    """

    setup: Setup
    diagnosis: Diagnosis | None = None

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        with sealed_checkpoint(self, trial, group=self.setup.mesh):
            super()._save_checkpoint(model, trial)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        checkpoints.begin(output_dir, group=self.setup.mesh)
        super()._save_optimizer_and_scheduler(output_dir)
        required(self.diagnosis).checkpoints.save(output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Refuse a checkpoint that cannot be resumed, before anything runs. The base model is not loaded from it."""
        required(self.diagnosis).checkpoints.check(resume_from_checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            required(self.diagnosis).checkpoints.load(checkpoint)

    def _get_grad_norm(self, model: nn.Module, grad_norm: float | None = None) -> None:
        """Return None: the norm over all chains together means nothing, and theta holds no gradient."""
