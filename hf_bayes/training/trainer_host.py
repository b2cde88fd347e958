"""A transformers Trainer as the objects of a run see it, and a few facts of its arguments.

``TrainerHost`` reads the private names of a trainer through ``members.compat.transformers``.
"""

from __future__ import annotations

import inspect
import logging
import math
import sys
from collections.abc import Callable, Sized
from contextlib import AbstractContextManager
from typing import Any, cast

import datasets
from accelerate.utils.memory import clear_device_cache
from torch import nn
from tqdm import tqdm
from transformers import (
    DefaultFlowCallback,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    ProgressCallback,
    Trainer,
    TrainingArguments,
)
from transformers.trainer_callback import CallbackHandler
from transformers.trainer_utils import align_special_tokens

from hf_bayes.members.compat import transformers as compat
from hf_bayes.training.arguments import BayesianTrainingArguments

logger = logging.getLogger("hf_bayes.training.trainer")


class TrainerHost:
    """A transformers Trainer, as our objects see it: its arguments, data sets and a few of its private methods."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    @property
    def args(self) -> BayesianTrainingArguments:
        """The training arguments."""
        return cast(BayesianTrainingArguments, self._trainer.args)

    @property
    def directory(self) -> str:
        """The output directory."""
        return str(self._trainer.args.output_dir)

    @property
    def train_dataset(self) -> Any:
        """The training data."""
        return self._trainer.train_dataset

    @property
    def eval_dataset(self) -> Any:
        """The evaluation data; of several, a mapping by name."""
        return self._trainer.eval_dataset

    @property
    def eval_sets(self) -> dict[str, Any]:
        """The held-out data sets by name. A single one, or None, has the name ""."""
        return eval_sets(self.eval_dataset)

    @property
    def tokenizer(self) -> Any:
        """The tokenizer or processor of the run."""
        return self._trainer.processing_class

    @property
    def callback_handler(self) -> Any:
        """The callbacks of the run."""
        return self._trainer.callback_handler

    @property
    def log_history(self) -> list[dict[str, Any]]:
        """The logs so far."""
        return list(self._trainer.state.log_history)

    @property
    def is_first_process(self) -> bool:
        """True in the first process of all."""
        return bool(self._trainer.is_world_process_zero())

    @property
    def mixed_precision(self) -> str:
        """The precision of autocast, "no" or "bf16"."""
        return str(self._trainer.accelerator.mixed_precision)

    def say(self, message: str, *values: object) -> None:
        """Log; where the log is off, write beside the progress bar, if that is shown."""
        logger.info(message, *values)
        if not logger.isEnabledFor(logging.INFO) and not self.args.disable_tqdm and self.is_first_process:
            tqdm.write(message % values, file=sys.stderr)

    def warn(self, message: str, *values: object) -> None:
        """Log a warning, in the first process."""
        if self.is_first_process:
            logger.warning(message, *values)

    def align_special_tokens(self) -> None:
        """Give the model's config the special tokens of the tokenizer, as ``Trainer.train`` does.

        That is too late for checks and trials before the first update, and for an evaluation before training: a
        classifier with a decoder needs the token of padding in every batch.
        """
        if isinstance(self.tokenizer, PreTrainedTokenizerBase | ProcessorMixin):
            align_special_tokens(self._trainer.model, self.tokenizer)

    def checkpoint_activations(self) -> None:
        """Switch activation checkpointing on, if the arguments ask for it.

        Trainer does so at the beginning of ``train``. The trial of rates comes before that, and needs the memory, too.
        """
        compat.enable_checkpointing(self._trainer.model, self.args)

    def prepare(self, batch: Any) -> Any:
        """Move a batch to the device, as Trainer does."""
        return compat.prepared_inputs(self._trainer, batch)

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context of a forward in training."""
        return cast(AbstractContextManager[Any], self._trainer.compute_loss_context_manager())

    @property
    def gradient_state(self) -> Any:
        """Accelerate's place in the current data loader."""
        return self._trainer.accelerator.gradient_state

    def evaluation_autocast(self) -> AbstractContextManager[Any]:
        """Return the context of a forward in evaluation."""
        return cast(AbstractContextManager[Any], self._trainer.accelerator.autocast())

    def empty_device_cache(self) -> None:
        """Empty the device's cache every ``torch_empty_cache_steps`` updates, as Trainer's own step does."""
        steps = self.args.torch_empty_cache_steps
        if steps is not None and self._trainer.state.global_step % steps == 0:
            clear_device_cache()

    def measure(self, prefix: str) -> dict[str, float]:
        """Return what ``evaluate`` finds on the trainer's own eval_dataset, without its callbacks.

        The save of a posterior needs these figures. The user's callbacks do not see them, because a callback would take
        them for an evaluation of the run: it could stop the run, log the figures after the end of the run, or raise an
        error because the metric that it reads is missing. Then nothing would be saved.
        """
        trainer = self._trainer
        kept = trainer.callback_handler, trainer.compute_metrics
        # the callbacks that show progress; Trainer's handler warns if the other one is not there
        shown = [each for each in kept[0].callbacks if isinstance(each, ProgressCallback)]
        silent = [DefaultFlowCallback(), *shown]
        trainer.callback_handler = CallbackHandler(
            silent, trainer.model, trainer.processing_class, trainer.optimizer, trainer.lr_scheduler
        )
        trainer.compute_metrics = None
        metrics: dict[str, float] = {}
        try:
            for name in self.eval_sets:
                output = trainer.evaluation_loop(
                    trainer.get_eval_dataloader(name or None),
                    description="Evaluation",
                    prediction_loss_only=True,
                    metric_key_prefix=f"{prefix}_{name}" if name else prefix,
                )
                metrics |= output.metrics or {}
                # ends the bar
                trainer.callback_handler.on_predict(trainer.args, trainer.state, trainer.control, output.metrics)
        finally:
            trainer.callback_handler, trainer.compute_metrics = kept
        return metrics

    def without_unused(self, dataset: Any, what: str) -> tuple[Any, Callable[..., Any]]:
        """Return a data set and its collator without columns that the model does not take, as Trainer leaves them out.

        A stream that was mapped names its columns only as its rows come by: the collator leaves them out.
        """
        trainer = self._trainer
        if isinstance(dataset, (datasets.Dataset, datasets.IterableDataset)) and dataset.column_names is not None:
            return compat.without_unused_columns(trainer, dataset, what), trainer.data_collator
        return dataset, compat.collator_without_unused_columns(trainer, what)

    def wrap_collator(self, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replace the trainer's data collator by ``wrap`` of it."""
        self._trainer.data_collator = wrap(self._trainer.data_collator)

    def keep_columns(self, core: nn.Module, also: tuple[str, ...] = ()) -> None:
        """Keep the columns that the wrapped model takes, and labels, and ``also`` others.

        A host such as TRL's SFTTrainer keeps other columns for its collator, such as the lengths of packed documents.
        """
        trainer = self._trainer
        columns = [*inspect.signature(core.forward).parameters, *trainer.label_names, "label", "label_ids", *also]
        compat.keep_columns(trainer, [*columns, *compat.columns_of_subclass(trainer)])


def eval_sets(given: Any) -> dict[str, Any]:
    """Return held-out data sets by name. A single one, or None, has the name ""."""
    return given if isinstance(given, dict) else {"": given}


def heldout_name(given: Any) -> str | None:
    """Return which of the held-out data sets a run fits by: the only one, "", or of several the one named "heldout".

    Args:
        given: as for ``eval_sets``.
    Returns:
        None if there are several, and none of them has this name.
    """
    return next((name for name in ("", "heldout") if name in eval_sets(given)), None)


def expected_updates(args: Any, train_dataset: Any) -> int | None:
    """Return about how many updates Trainer will make, before it has made a loader; None if that cannot be told.

    Args:
        args, train_dataset: as the user gave them.
    """
    if not isinstance(args, TrainingArguments):
        return None
    if args.max_steps > 0:
        return args.max_steps
    if not isinstance(train_dataset, Sized) or getattr(args, "packing", False):
        return None
    rows = args.train_batch_size * args.gradient_accumulation_steps
    return math.ceil(args.num_train_epochs * math.ceil(len(train_dataset) / rows))


def without_data_parallel(accelerator: Any) -> None:
    """Make an accelerator wrap no model in DistributedDataParallel, which would average chains."""
    prepare = accelerator.prepare_model

    def prepare_model(model: Any, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
        return prepare(model, device_placement=device_placement, evaluation_mode=True)

    accelerator.prepare_model = prepare_model
