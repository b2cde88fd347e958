"""The step size of a run behind the interface of a torch optimizer, for Trainer's schedulers and checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import SchedulerType, get_scheduler

from hf_bayes.core.config import MethodConfig
from hf_bayes.methods.assembly import rate_factor
from hf_bayes.training.active_run import ActiveRun
from hf_bayes.training.arguments import BayesianTrainingArguments


class LearningRate(torch.optim.Optimizer):
    """An optimizer that holds a learning rate and nothing else: ``Run.update`` moves the chains."""

    def __init__(self, theta: torch.nn.Parameter, learning_rate: float) -> None:
        super().__init__([theta], {"lr": learning_rate})

    def step(self, closure: Callable[..., Any] | None = None) -> None:  # type: ignore[override]
        """Do nothing: the update is over when Trainer calls this."""


def check_schedule(method: MethodConfig, args: BayesianTrainingArguments, num_steps: int) -> None:
    """Check the schedule of a run before its learning rate is found, because a trial of rates takes time.

    Where no learning rate is given, the peak counts as 1, which is more than a trial finds. A schedule that fits this
    peak may exceed the rate that is found (``min_lr``): ``schedule`` checks it again.

    Args:
        method: the config, for batches of this size.
        args: the training arguments.
        num_steps: the number of updates in the whole run.
    Raises:
        ValueError: as ``schedule``.
    """
    if method.schedule is None:
        peak = 1.0 if args.learning_rate is None else args.learning_rate
        _schedule_of_arguments(args, LearningRate(torch.nn.Parameter(torch.zeros(1)), peak), num_steps)


def schedule(active: ActiveRun, rate: LearningRate) -> Any:
    """Return the method's schedule if it has one; else that of the training arguments, checked to its end.

    Args:
        active: the run.
        rate: its learning rate.
    Raises:
        ValueError: for arguments that the schedule does not have, and for a rate above the peak.
    """
    if active.method.schedule is not None:
        return LambdaLR(rate, partial(rate_factor, active.method, draw_steps=active.problem.draw_steps))
    return _schedule_of_arguments(active.host.args, rate, active.problem.num_steps)


def _schedule_of_arguments(args: BayesianTrainingArguments, rate: LearningRate, num_steps: int) -> Any:
    """Return the schedule of the training arguments, after a check of every step."""
    own: Any = args.lr_scheduler_kwargs  # TrainingArguments has made a dict of a text
    try:
        found = get_scheduler(args.lr_scheduler_type, rate, args.get_warmup_steps(num_steps), num_steps, own)
    except TypeError as error:
        raise ValueError(
            f"lr_scheduler_kwargs={own!r} do not fit lr_scheduler_type="
            f"{SchedulerType(args.lr_scheduler_type).value!r} ({error}): correct them, or leave them out"
        ) from error
    _require_below_peak(found, num_steps, args)
    return found


def _require_below_peak(scheduler: Any, num_steps: int, args: BayesianTrainingArguments) -> None:
    """Check every step of Trainer's schedule.

    Raises:
        ValueError: naming the step at which it leaves [0, the peak].
    """
    given = args.learning_rate
    peak = "the peak" if given is None else f"learning_rate={given:g}, the peak"
    for factor in getattr(scheduler, "lr_lambdas", ())[:1]:
        for step in range(num_steps):
            if not 0 <= factor(step) <= 1 + 1e-9:
                share = f"{factor(step):g} times the peak learning rate"
                size = share if given is None else f"a learning rate of {factor(step) * given:g}"
                raise ValueError(
                    f"lr_scheduler_type={SchedulerType(args.lr_scheduler_type).value!r} gives {size} at step "
                    f"{step + 1}: it must stay within 0 and {peak} that frictions are fixed for. Change "
                    "lr_scheduler_kwargs"
                )
