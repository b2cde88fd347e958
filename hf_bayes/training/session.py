"""The beginning of a run: a trainer's data are checked, and then its chains are made ready for their first update."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple, TypeVar

from transformers import TrainerState
from transformers.trainer_utils import SaveStrategy

from hf_bayes.models.input_check import check_vocabulary
from hf_bayes.objectives.label_columns import columns_of, with_columns
from hf_bayes.posteriors.storage import check_writable
from hf_bayes.training import checkpoints
from hf_bayes.training.active_run import ActiveRun
from hf_bayes.training.announcement import announce
from hf_bayes.training.calibrating import reason_against, require_calibration
from hf_bayes.training.compat import TrainerHost
from hf_bayes.training.diagnosis import Diagnosis
from hf_bayes.training.heldout_rows import HeldOutData
from hf_bayes.training.learning_rate import LearningRate
from hf_bayes.training.preferences import PairRows
from hf_bayes.training.refusals import refuse_batch_statistics, require_all_chains
from hf_bayes.training.resuming import RunCheckpoints
from hf_bayes.training.rows import TrainingRows
from hf_bayes.training.setup import Setup
from hf_bayes.training.step_lines import shorten_lines
from hf_bayes.uncertainty.custom.bradley_terry import Preferences

Part = TypeVar("Part")


def required(part: Part | None, message: str = "there is no run yet: call train() first") -> Part:
    """Return a part of a trainer or of its run.

    Raises:
        ValueError: with the message, if there is no such part yet.
    """
    if part is None:
        raise ValueError(message)
    return part


def take_data(host: TrainerHost, setup: Setup) -> TrainingRows | None:
    """Return the training rows of a trainer, None without any, after checks of its tokenizer and data sets.

    Raises:
        ValueError: for a tokenizer of another model, or data that cannot be counted or dealt to chains.
    """
    model, method = setup.model, setup.method
    check_vocabulary(host.tokenizer, model.core)
    if setup.inherited is not None:
        setup.inherited.check_tokenizer(host.tokenizer)
    host.keep_columns(model.core, columns_of(model.likelihood))
    host.wrap_collator(partial(with_columns, model.likelihood))
    if isinstance(model.likelihood, Preferences):
        host.wrap_collator(partial(PairRows, precomputed=getattr(host.args, "precompute_ref_log_probs", False)))
    rows = None if host.train_dataset is None else TrainingRows(host, model, method, setup.mesh)
    method, needs = (method, method.requirements) if rows is None else (rows.method, rows.requirements)
    require_all_chains(method, setup.mesh)
    refuse_batch_statistics(host, model, method)
    if needs.heldout != "none":
        HeldOutData(host).check(model, method)
    require_calibration(host, model)
    if needs.heldout != "none" or reason_against(host, model) is None:
        HeldOutData(host).require_same(setup.mesh)
    if setup.mesh.chain_size > 1:  # an evaluation before training sees all chains, too
        model.show(model.theta.detach(), setup.spread)
    return rows


class Begun(NamedTuple):
    """A run before its first update.

    Attributes:
        active: the run.
        diagnosis: its diagnostics and checkpoints.
        optimizer: its learning rate.
        checkpoint: the checkpoint that it resumes from, which belongs to this run; None for a new run.
        num_updates: the updates of the checkpoint.
    """

    active: ActiveRun
    diagnosis: Diagnosis
    optimizer: LearningRate
    checkpoint: str | None
    num_updates: int

    def end(self) -> TrainerState | None:
        """Load a checkpoint that is the end of the run, and return Trainer's state there; None if updates are left.

        Trainer would make one more update.
        """
        if self.checkpoint is None or self.num_updates < self.active.problem.num_steps:
            return None
        return self.diagnosis.checkpoints.load_end(self.checkpoint)


def begin(host: TrainerHost, setup: Setup, rows: TrainingRows | None, resume: str | bool | None) -> Begun:
    """Return a run that has been announced, after all checks that need no update.

    Args:
        resume: a checkpoint; True takes the newest one that is complete.
    Raises:
        ValueError: if the model was detached, there are no training rows, the output directory cannot hold a posterior,
            there is no checkpoint, it is damaged or belongs to another run, or the run is too short for its draws.
        FileNotFoundError: if a file of the checkpoint is missing.
    """
    args = host.args
    setup.model.members.require_attached()
    rows = required(rows, "training needs a train_dataset, got None")
    check_writable(host.directory, overwrite=True)
    rows.check_likelihood()  # before a range test differentiates it
    checkpoint = checkpoints.required_newest(host.directory) if resume is True else resume or None
    found = None if checkpoint is None else checkpoints.settings_of(checkpoint).get("found_rate")
    active = ActiveRun(host, setup, rows, found_rate=found)
    saves = checkpoint is not None or args.save_strategy != SaveStrategy.NO
    diagnosis = Diagnosis(active, RunCheckpoints(active, identified=saves))
    num_updates = 0 if checkpoint is None else diagnosis.checkpoints.check(checkpoint)
    shorten_lines(host.callback_handler)
    announce(active)
    rows.refuse_mixed_documents()
    optimizer = LearningRate(setup.model.theta, active.problem.learning_rate)
    return Begun(active, diagnosis, optimizer, checkpoint, num_updates)
