"""The beginning of a run: from the settings of a trainer to chains that are ready for their first update."""

from __future__ import annotations

from typing import NamedTuple

from transformers.trainer_utils import SaveStrategy

from hf_bayes.posteriors.storage import check_writable
from hf_bayes.training import checkpoints
from hf_bayes.training.active_run import ActiveRun
from hf_bayes.training.announcement import announce
from hf_bayes.training.compat import TrainerHost
from hf_bayes.training.diagnosis import Diagnosis
from hf_bayes.training.learning_rate import LearningRate
from hf_bayes.training.messages import Messages
from hf_bayes.training.resuming import RunCheckpoints
from hf_bayes.training.rows import TrainingRows
from hf_bayes.training.setup import Setup
from hf_bayes.training.step_lines import shorten_lines


class Begun(NamedTuple):
    """A run before its first update.

    Attributes:
        active: the run.
        diagnosis: its diagnostics and checkpoints.
        optimizer: its learning rate.
        checkpoint: the checkpoint that it resumes from; None for a new run.
    """

    active: ActiveRun
    diagnosis: Diagnosis
    optimizer: LearningRate
    checkpoint: str | None

    @property
    def is_over(self) -> bool:
        """True if the checkpoint is the end of the run. (Trainer would make one more update.)"""
        if self.checkpoint is None:
            return False
        return self.diagnosis.checkpoints.check(self.checkpoint) >= self.active.problem.num_steps


def begin(host: TrainerHost, setup: Setup, rows: TrainingRows | None, resume: str | bool | None) -> Begun:
    """Return a run that has been announced, after all checks that need no update.

    Args:
        resume: a checkpoint; True takes the newest one that is complete.
    Raises:
        ValueError: if the model was detached, there are no training rows, the output directory cannot hold a posterior,
            there is no checkpoint, or the run is too short for its draws.
    """
    args = host.args
    setup.model.members.require_attached()
    if rows is None:
        raise ValueError("training needs a train_dataset, got None")
    check_writable(host.directory, overwrite=True)
    checkpoint = checkpoints.required_newest(host.directory) if resume is True else resume or None
    active = ActiveRun(host, setup, rows)
    saves = checkpoint is not None or args.save_strategy != SaveStrategy.NO
    diagnosis = Diagnosis(active, RunCheckpoints(active, identified=saves))
    shorten_lines(host.callback_handler)
    announce(active, Messages(host))
    rows.refuse_mixed_documents()
    return Begun(active, diagnosis, LearningRate(setup.model.theta, args.learning_rate), checkpoint)
