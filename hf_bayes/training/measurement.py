"""An evaluation for a save, hidden from the callbacks of the run."""

from __future__ import annotations

from typing import Any

from transformers import DefaultFlowCallback, ProgressCallback, Trainer
from transformers.trainer_callback import CallbackHandler


def measure(trainer: Trainer, prefix: str) -> dict[str, float]:
    """Return the metrics of ``evaluate`` on the trainer's own eval_dataset, without calling its callbacks.

    A save needs these figures, not the run. A callback would take them for an evaluation of the run and stop it, log
    them after its end, or miss the name that it reads, and then nothing would be saved.
    """
    datasets = trainer.eval_dataset
    names: list[Any] = list(datasets) if isinstance(datasets, dict) else [None]
    kept = trainer.callback_handler, trainer.compute_metrics
    # the callback that shows progress; Trainer's handler warns if the other one is not there
    silent = [DefaultFlowCallback(), *([] if trainer.args.disable_tqdm else [ProgressCallback()])]
    trainer.callback_handler = CallbackHandler(
        silent, trainer.model, trainer.processing_class, trainer.optimizer, trainer.lr_scheduler
    )
    trainer.compute_metrics = None
    metrics: dict[str, float] = {}
    try:
        for name in names:
            output = trainer.evaluation_loop(
                trainer.get_eval_dataloader(name),
                description="Evaluation",
                prediction_loss_only=True,
                metric_key_prefix=prefix if name is None else f"{prefix}_{name}",
            )
            metrics |= output.metrics or {}
            # ends the bar
            trainer.callback_handler.on_predict(trainer.args, trainer.state, trainer.control, output.metrics)
    finally:
        trainer.callback_handler, trainer.compute_metrics = kept
    return metrics
