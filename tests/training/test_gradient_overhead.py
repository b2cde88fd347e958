"""The gradients that a run with nothing set takes beside those of its updates, without a control variate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hf_bayes.methods.recommended import on_ladder
from hf_bayes.objectives import range_test
from tests import runs
from tests.tiny_models import tiny_bert

UPDATES, BATCH = 300, 8


def overhead(directory: Path) -> float:
    """Return how many more gradients of rows a default run of four chains takes, as a share of its updates' own.

    A gradient of a row is counted where the row passes the head while gradients are recorded. No chain has a control
    variate, because a pass over these rows is longer than the updates.
    """
    trainer = runs.trainer(
        directory, on_ladder(), model=tiny_bert(), subspace="last_layer", train=runs.label_rows(2000),
        eval_dataset=runs.label_rows(200, seed=7), learning_rate=None, max_steps=UPDATES, minibatch="shared",
        per_device_train_batch_size=BATCH, per_device_eval_batch_size=100, logging_strategy="no", map_updates=0,
    )  # fmt: skip
    counted = 0

    def count(module: Any, inputs: Any) -> None:
        nonlocal counted
        counted += inputs[0][..., 0].numel() if torch.is_grad_enabled() else 0

    head = trainer.bayesian.model.get_submodule("classifier")
    head.register_forward_pre_hook(count)
    trainer.train()
    return counted / (trainer.method.num_chains * UPDATES * BATCH) - 1


def test_a_default_run_takes_few_gradients_beside_updates(tmp_path: Path) -> None:
    """The page on automatic settings says 7 %, whose parts are fixed shares of the run, rounded to whole updates."""
    assert overhead(tmp_path) == pytest.approx(0.07, abs=0.01)


def test_a_longer_trial_of_rates_takes_more_than_a_tenth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(range_test, "SHARE", 0.17)  # of a run of 1,000 gradients or more
    assert overhead(tmp_path) > 0.1
