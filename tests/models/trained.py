"""A short run of a model on rows of its task, and a model with a folder of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from tests import runs


def run(tmp_path: Path, model: nn.Module, rows: list[dict], held_out: list[dict], **changes: Any) -> Any:
    return runs.trainer(
        tmp_path / "posterior",
        SGHMCConfig(num_chains=2, draws_per_chain=2),
        model=model,
        train=rows,
        eval_dataset=held_out,
        max_steps=4,
        **changes,
    )


def from_disk(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """The model with a folder of its own, so that a posterior on it finds its base again."""
    model.save_pretrained(folder)
    return type(model).from_pretrained(folder)
