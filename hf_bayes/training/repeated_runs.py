"""Several runs on one model, one after the other: each attaches the model and gives it back."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import PrinterCallback
from transformers.trainer_utils import SaveStrategy

from hf_bayes.core.config import MethodConfig
from hf_bayes.models.base import BayesianModel
from hf_bayes.training.arguments import BayesianTrainingArguments
from hf_bayes.training.trainer import BayesianTrainer


def require_repeatable(name: str, model: Any, args: BayesianTrainingArguments) -> None:
    """Raise a ValueError if runs cannot be repeated on this model, or in this number of processes.

    Args:
        name: the name of the function that repeats runs, for the message.
        model: the model as a user gave it.
        args: the training arguments of the runs.
    """
    if isinstance(model, BayesianModel):
        raise ValueError(
            f"{name} attaches the model anew for each run, got an attached {type(model).__name__}: give the model that "
            "its detach() returns"
        )
    if args.world_size > 1:
        raise ValueError(
            f"{name} runs in one process, and there are {args.world_size}: run it in one, and train the final "
            "posterior with accelerate launch"
        )


@contextmanager
def prepared_run(
    model: Any, method: MethodConfig, args: BayesianTrainingArguments, *, given: dict[str, Any], **changes: Any
) -> Iterator[BayesianTrainer]:
    """Yield a trainer that has not trained yet, without messages, logs and checkpoints; then give the model back.

    Args:
        model: a transformers or peft model.
        given: arguments of ``BayesianTrainer``.
        changes: arguments that take the place of those in ``args``, which stay as they are.
    """
    args = copy.copy(args)
    changes = {
        "disable_tqdm": True, "save_strategy": SaveStrategy.NO, "eval_strategy": "no", "logging_strategy": "no",
        "report_to": [], "map_updates": 0, "push_to_hub": False, **changes,
    }  # fmt: skip
    for name, value in changes.items():
        setattr(args, name, value)
    with _quiet():
        trainer = BayesianTrainer(model=model, method=method, args=args, **given)
        trainer.remove_callback(PrinterCallback)  # single runs print nothing
        try:
            yield trainer
        finally:
            trainer.bayesian.detach()


@contextmanager
def finished_run(
    model: Any, method: MethodConfig, args: BayesianTrainingArguments, *, given: dict[str, Any], **changes: Any
) -> Iterator[BayesianTrainer]:
    """Train, and yield the trainer. The arguments are those of ``prepared_run``."""
    with prepared_run(model, method, args, given=given, **changes) as trainer:
        trainer.train()
        yield trainer


@contextmanager
def _quiet() -> Iterator[None]:
    """Leave messages of single runs out."""
    logger = logging.getLogger("hf_bayes")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
