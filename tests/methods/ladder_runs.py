"""Runs of a tiny model with a ladder of settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import TrainerCallback

from hf_bayes.methods.registry import METHODS
from tests import runs
from tests.tiny_models import tiny_bert

STEPS = 48
LADDER = {"temperature": [1.0, 0.01], "prior_scale": [1.0, 0.5]}
WARM = {"warm_start_steps": 4, "warm_start_learning_rate": 1e-2}
CHOICE = 18
"""The update after which a run of ``STEPS`` updates with a given learning rate chooses: three quarters of burn-in."""


class Watch(TrainerCallback):
    """Keep theta after every update."""

    def __init__(self) -> None:
        self.theta: list[Tensor] = []
        self.trainer: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.theta.append(self.trainer.run.theta.clone())


def trainer(directory: Path, method: Any, watch: Watch | None = None, *, heldout: int = 200, **changes: Any) -> Any:
    """Return a run of the last layer of a tiny Bert on labels that can be learnt."""
    found = runs.trainer(
        directory, method, model=tiny_bert(), subspace="last_layer", train=runs.label_rows(40, num_labels=3),
        eval_dataset=runs.label_rows(heldout, num_labels=3, seed=7), callbacks=[watch] if watch else None,
        **{"max_steps": STEPS, "per_device_eval_batch_size": 100, "logging_strategy": "no", **changes},
    )  # fmt: skip
    if watch is not None:
        watch.trainer = found
    return found


def config(name: str = "sghmc", **fields: Any) -> Any:
    return METHODS[name](**{"num_chains": 4, "draws_per_chain": 2, "prior_std": 1.0, "ladder": LADDER, **fields})
