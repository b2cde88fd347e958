"""The last steps of a training script: train or tune, evaluate, save, push, and end the process group."""

from __future__ import annotations

import gc
from typing import Any

from accelerate import PartialState

from hf_bayes.cli.arguments import MethodArguments
from hf_bayes.core.config import MethodConfig
from hf_bayes.training.arguments import BayesianTrainingArguments
from hf_bayes.training.trainer import BayesianTrainer
from hf_bayes.training.tuning.tune import tune


def train_or_tune(
    model: Any, args: BayesianTrainingArguments, method: MethodConfig | None, *, chosen: MethodArguments, **given: Any
) -> None:
    """Train and save; with ``--method auto`` compare methods within a budget and save the best.

    Args:
        method: ``chosen.config()``.
        chosen: the method, as the user gave it.
        given: arguments that ``BayesianTrainer`` and ``tune`` have in common.
    """
    if chosen.compares:
        tune(model, args, budget=chosen.budget, **given)
    else:
        train_and_save(BayesianTrainer(model=model, method=method, args=args, **given))


def train_and_save(trainer: BayesianTrainer) -> None:
    """Train or resume, evaluate on held-out rows if there are any, save, and push if the arguments request it.

    ``resume_from_checkpoint`` is text from a file or a command line: a folder, "true" for the newest complete
    checkpoint in output_dir, or "false" for none. Upper and lower case mean the same.
    """
    given = trainer.args.resume_from_checkpoint
    words = {"true": True, "false": None}
    trainer.train(resume_from_checkpoint=words.get(given.lower(), given) if isinstance(given, str) else given)
    metrics = None if trainer.eval_dataset is None else trainer.evaluate()
    if metrics is not None:
        trainer.log_metrics("eval", metrics)
    trainer.save_model()
    if metrics is not None:
        trainer.save_metrics("eval", metrics)
    if trainer.args.push_to_hub:
        trainer.push_to_hub()


def end_process_group() -> None:
    """End the process group. Call this as the last line of a launched script, outside the function with the trainer.

    The threads of gloo end with the last reference to their group. A trainer is part of reference cycles, so it would
    hold its groups until the interpreter shuts down. The threads would then abort a process that has finished.
    """
    PartialState().destroy_process_group()
    gc.collect()
