"""The step size of a run behind the interface of a torch optimizer, for Trainer's schedulers and checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import SchedulerType, get_scheduler

from hf_bayes.methods.registry import rate_factor
from hf_bayes.training.active_run import ActiveRun


class LearningRate(torch.optim.Optimizer):
    """An optimizer that holds a learning rate and nothing else: ``Run.update`` moves the chains."""

    def __init__(self, theta: torch.nn.Parameter, learning_rate: float) -> None:
        super().__init__([theta], {"lr": learning_rate})

    def step(self, closure: Callable[..., Any] | None = None) -> None:  # type: ignore[override]
        """Do nothing: the update is over when Trainer calls this."""


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
    args, num_steps = active.host.args, active.problem.num_steps
    own: Any = args.lr_scheduler_kwargs  # TrainingArguments has made a dict of a text
    try:
        found = get_scheduler(args.lr_scheduler_type, rate, args.get_warmup_steps(num_steps), num_steps, own)
    except TypeError as error:
        raise ValueError(
            f"lr_scheduler_kwargs={own!r} do not fit lr_scheduler_type="
            f"{SchedulerType(args.lr_scheduler_type).value!r} ({error}): correct them, or leave them out"
        ) from error
    _require_below_peak(found, num_steps, args, active.problem.learning_rate)
    return found


def _require_below_peak(scheduler: Any, num_steps: int, args: Any, peak: float) -> None:
    """Check every step of Trainer's schedule.

    Raises:
        ValueError: naming the step at which it leaves [0, learning_rate].
    """
    for factor in getattr(scheduler, "lr_lambdas", ())[:1]:
        for step in range(num_steps):
            if not 0 <= factor(step) <= 1 + 1e-9:
                raise ValueError(
                    f"lr_scheduler_type={SchedulerType(args.lr_scheduler_type).value!r} gives a learning rate of "
                    f"{factor(step) * peak:g} at step {step + 1}: it must stay within 0 and "
                    f"learning_rate={peak:g}, the peak that frictions are fixed for. Change "
                    "lr_scheduler_kwargs"
                )
