"""The steps that all training commands and scripts share: begin, train or tune, evaluate, save, push, and end."""

from __future__ import annotations

import gc
import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import PartialState
from rich.console import Console
from transformers import set_seed
from transformers.utils import logging

from hf_bayes.cli.arguments import MethodArguments
from hf_bayes.cli.progress import one_bar, without_messages
from hf_bayes.cli.training_table import table
from hf_bayes.posteriors.config import CONFIG, PosteriorConfig
from hf_bayes.training.arguments import BayesianTrainingArguments
from hf_bayes.training.checkpoints import newest_complete
from hf_bayes.training.trainer import BayesianTrainer
from hf_bayes.training.trainer_host import TrainerHost
from hf_bayes.training.tuning.tune import tune


class ModelAndData(NamedTuple):
    """A model with its data. The fields have the names of the arguments of ``BayesianTrainer`` and ``tune``."""

    model: Any
    train_dataset: Any
    eval_dataset: Any
    data_collator: Any
    processing_class: Any


def begin(args: BayesianTrainingArguments) -> None:
    """Set the level of transformers' log and the seed, before the model is made. Only a terminal gets a bar."""
    logging.set_verbosity(args.get_process_log_level())  # type: ignore[no-untyped-call]
    if args.log_level == "passive" and not sys.stderr.isatty():
        args.disable_tqdm = True
    set_seed(args.seed)  # a new adapter or head is then equal in every process and in every run


def train_or_tune(inputs: ModelAndData, args: BayesianTrainingArguments, chosen: MethodArguments) -> None:
    """Train and save; with ``--method auto`` compare methods within a budget and save the best."""
    if chosen.compares:
        tune(args=args, budget=chosen.budget, subspace=chosen.subspace, **inputs._asdict())
    else:
        method = chosen.config()
        trainer = BayesianTrainer(method=method, args=args, subspace=chosen.subspace, **inputs._asdict())
        train_and_save(trainer)


def train_and_save(trainer: BayesianTrainer) -> None:
    """Train or resume, evaluate on held-out rows if there are any, save, and push if the arguments request it.

    One progress bar and a table are shown. With ``log_level`` "info", the messages and logs of the run are, too.
    """
    args = trainer.args
    quiet = args.log_level == "passive"
    if quiet:
        one_bar(trainer)
    with without_messages() if quiet else nullcontext():
        trainer.train(resume_from_checkpoint=resume_point(args.resume_from_checkpoint))
        metrics = None if trainer.eval_dataset is None else trainer.evaluate()
        trainer.saved.save(TrainerHost(trainer), trainer.active, str(args.output_dir))  # save_model would push, too
    if metrics is not None:
        trainer.save_metrics("eval", metrics)
    if trainer.is_world_process_zero():
        saved = json.loads((Path(str(args.output_dir)) / CONFIG).read_text(encoding="utf-8"))  # of all processes
        Console().print(table(PosteriorConfig.from_dict(saved), str(args.output_dir)))
    if args.push_to_hub:
        trainer.push_to_hub()


def continuing_comparison(*_: Any) -> str:
    """Return how to continue a command that keeps what is finished in its output directory."""
    return "The same command continues it."


def continuing_training(_: Any, chosen: MethodArguments, *others: Any) -> str:
    """Return how to continue ``train`` or ``classify``, from their arguments: the trainer's are the last ones."""
    args: BayesianTrainingArguments = others[-1]
    if chosen.compares:
        return continuing_comparison()
    newest = newest_complete(str(args.output_dir))
    if newest is None:
        return f"{args.output_dir} holds no checkpoint: the same command begins anew (--save_steps for checkpoints)."
    return f"The same command with --resume_from_checkpoint true continues it at {newest}."


def resume_point(given: str | bool | None) -> str | bool | None:
    """Return the argument of ``train`` for ``resume_from_checkpoint`` as text from a file or a command line.

    The text is a folder, "true" for the newest complete checkpoint in output_dir, or "false" for none. Upper and lower
    case mean the same.
    """
    words: dict[str, bool | None] = {"true": True, "false": None}
    return words.get(given.lower(), given) if isinstance(given, str) else given


def end_process_group() -> None:
    """End the process group, if there is one.

    Call this as the last line of a launched script, outside the function with the trainer.
    The threads of gloo end with the last reference to their group. A trainer is part of reference cycles, so it would
    hold its groups until the interpreter shuts down. The threads would then abort a process that has finished.
    """
    if torch.distributed.is_initialized():
        PartialState().destroy_process_group()
        gc.collect()  # takes a third of a second
