"""The steps before the first update of a run: checks of a trainer's data, of a checkpoint and of the run itself."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple, TypeVar

from transformers.trainer_callback import TrainerState
from transformers.trainer_utils import SaveStrategy

from hf_bayes.models.input_check import check_vocabulary
from hf_bayes.objectives.label_columns import columns_of, with_columns
from hf_bayes.posteriors.storage import check_writable
from hf_bayes.training.active_run import ActiveRun
from hf_bayes.training.announcement import announce
from hf_bayes.training.calibrating import reason_against, require_calibration
from hf_bayes.training.checkpoints import SavedRun, required_newest, verified
from hf_bayes.training.checks.rows import refuse_batch_statistics, require_all_chains
from hf_bayes.training.data.heldout_rows import HeldOutData
from hf_bayes.training.data.preferences import PairRows
from hf_bayes.training.data.rows import TrainingRows
from hf_bayes.training.diagnosis import Diagnosis
from hf_bayes.training.label_noise import begin_with_spread
from hf_bayes.training.learning_rate import LearningRate, check_schedule, schedule
from hf_bayes.training.reports.step_lines import shorten_lines
from hf_bayes.training.resuming import RunCheckpoints
from hf_bayes.training.setup import Setup, given_back_on_error
from hf_bayes.training.trainer_host import TrainerHost, heldout_name
from hf_bayes.uncertainty.custom.bradley_terry import Preferences

Part = TypeVar("Part")


def required(part: Part | None, message: str = "there is no run yet: call train() first") -> Part:
    """Return ``part``.

    Raises:
        ValueError: with ``message``, if it is None.
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
    host.align_special_tokens()
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
    if setup.learns_noise:
        begin_with_spread(host, model)
    heldout = HeldOutData(host)
    heldout.check_sets(model, besides=None if needs.heldout == "none" else heldout_name(host.eval_dataset))
    if needs.heldout != "none":
        heldout.check(model, method)
    require_calibration(host, model)
    if needs.heldout != "none" or setup.learns_noise or reason_against(host, model) is None:
        heldout.require_same(setup.mesh)
    if setup.mesh.chain_size > 1:  # an evaluation before training sees all chains, too
        model.show(model.theta.detach(), setup.member_group)
    return rows


class Beginning(NamedTuple):
    """A run that has passed all checks which need no update.

    Attributes:
        active: the run.
        diagnosis: its diagnostics, with its checkpoints.
        learning_rate: its learning rate, for Trainer.
        scheduler: the schedule of the learning rate.
        checkpoint: the checkpoint that it resumes from; None for a new run.
        end: Trainer's state at the end of the run, if ``checkpoint`` is that end; otherwise None.
    """

    active: ActiveRun
    diagnosis: Diagnosis
    learning_rate: LearningRate
    scheduler: Any
    checkpoint: str | None
    end: TrainerState | None


def begin(host: TrainerHost, setup: Setup, rows: TrainingRows | None, resume: str | bool | None) -> Beginning:
    """Make a run, and announce it after all checks that need no update. An error leaves the model as it was.

    Args:
        host: the trainer.
        setup: its settings that do not change.
        rows: its training rows; None if it has none.
        resume: a checkpoint; True takes the newest one that is complete; None and False begin a new run.
    Raises:
        ValueError: if a run cannot be made of these rows or this checkpoint, if the model mixes packed documents, or if
            the learning-rate schedule is not possible.
    """
    rows = _rows_to_train_on(host, setup, rows)
    saved = _resumed_checkpoint(host, resume)
    with given_back_on_error(setup.model), ExitStack() as undo:
        undo.callback(setattr, rows, "run_number", rows.run_number)  # the rows then belong to the run before
        host.checkpoint_activations()
        if saved is None:
            active = ActiveRun(host, setup, rows)
        else:
            found = {"found_rate": saved.found_rate, "noise_std": saved.noise_std}
            active = ActiveRun(host, setup, rows, **found, number=saved.run_number)
        saves = saved is not None or host.args.save_strategy != SaveStrategy.NO
        checkpoints = RunCheckpoints(active, identified=saves)
        if saved is not None:
            checkpoints.check(saved)
        learning_rate = LearningRate(setup.model.theta, active.problem.learning_rate)
        scheduler = schedule(active, learning_rate)
        # Trainer would make one more update
        ends = saved is not None and saved.num_updates >= active.problem.num_steps
        end = checkpoints.load_end(saved.folder) if saved is not None and ends else None
        shorten_lines(host.callback_handler)
        announce(active)
        undo.pop_all()
    folder = None if saved is None else saved.folder
    return Beginning(active, Diagnosis(active, checkpoints), learning_rate, scheduler, folder, end)


def _rows_to_train_on(host: TrainerHost, setup: Setup, rows: TrainingRows | None) -> TrainingRows:
    """Return the training rows, after the checks that need no run: a run may begin with a long trial of rates.

    Raises:
        ValueError: if the model was detached, there are no training rows, the output directory cannot hold a posterior,
            a user's likelihood fails on the first rows, the model mixes packed documents, or the learning-rate schedule
            is not possible.
    """
    setup.model.members.require_attached()
    rows = required(rows, "training needs a train_dataset, got None")
    check_writable(host.directory, overwrite=True)
    if rows.stream is not None:
        rows.stream.keep_first()  # both checks read these rows; reading a stream twice could change it
    rows.check_likelihood()  # before a range test differentiates it
    rows.refuse_mixed_documents()
    check_schedule(rows.method, host.args, rows.num_steps)
    return rows


def _resumed_checkpoint(host: TrainerHost, resume: str | bool | None) -> SavedRun | None:
    """Return the checkpoint to resume from, after a check of its files; None for a new run.

    Args:
        host: the trainer.
        resume: a checkpoint; True takes the newest one that is complete.
    Raises:
        ValueError: if there is no checkpoint, or it is damaged.
        FileNotFoundError: if a file of the checkpoint is missing.
    """
    if resume is True:
        return required_newest(host.directory)
    return verified(resume) if resume else None
