"""The output of a quiet training run: one progress bar with the loss, and none of the lines between."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm
from transformers import PrinterCallback, ProgressCallback, Trainer


class OneBar(ProgressCallback):
    """A progress bar of training that shows the logged loss. The bar of an evaluation disappears at its end."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if self.training_bar is not None and "loss" in (logs or {}):
            self.training_bar.set_postfix_str(f"loss {logs['loss']:.4g}")

    def on_prediction_step(
        self, args: Any, state: Any, control: Any, eval_dataloader: Any = None, **kwargs: Any
    ) -> None:
        if state.is_world_process_zero and self.prediction_bar is None and hasattr(eval_dataloader, "__len__"):
            self.prediction_bar = tqdm(total=len(eval_dataloader), desc="held-out rows", leave=False)
        super().on_prediction_step(args, state, control, eval_dataloader, **kwargs)  # type: ignore[no-untyped-call]


def one_bar(trainer: Trainer) -> None:
    """Replace the callback that shows progress and logs by ``OneBar``, or by nothing with ``disable_tqdm``."""
    for kind in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(kind)
    if not trainer.args.disable_tqdm:
        trainer.add_callback(OneBar)


@contextmanager
def without_messages() -> Iterator[None]:
    """Leave the messages of runs out of the block; warnings stay.

    A trainer writes a message beside its bar where the log does not take it. So the log takes it, at a level that no
    handler shows by default.
    """
    logger = logging.getLogger("hf_bayes.training.trainer")
    before = logger.level
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(before)
