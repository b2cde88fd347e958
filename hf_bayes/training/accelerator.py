"""Trainer's accelerator, for a model whose chains must not be averaged."""

from __future__ import annotations

from typing import Any

from hf_bayes.training.refused_arguments import refuse_accelerator


def without_data_parallel(accelerator: Any) -> None:
    """Make an accelerator wrap no model in DistributedDataParallel, which would average chains.

    Raises:
        ValueError: for an accelerator that shards models or scales losses.
    """
    refuse_accelerator(accelerator)
    prepare = accelerator.prepare_model

    def prepare_model(model: Any, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
        return prepare(model, device_placement=device_placement, evaluation_mode=True)

    accelerator.prepare_model = prepare_model
