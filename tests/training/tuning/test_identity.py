"""A tuning takes the trials of earlier calls if data, model and settings are the same."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import default_data_collator

from hf_bayes.training.tuning import trials as trials_module
from hf_bayes.training.tuning.tune import Tuning
from tests.tiny_models import tiny_bert, tiny_tokenizer
from tests.training.tuning.tuned import CANDIDATES, call, learnable, only_failing


def another_head() -> Any:
    model = tiny_bert()
    torch.nn.init.normal_(model.classifier.weight, generator=torch.Generator().manual_seed(5))
    return model


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"eval_dataset": learnable(200, 2)}, "heldout.fingerprint: saved '"),
        ({"eval_dataset": learnable(201, 1)}, "heldout.num_rows: saved 200, now 201"),
        ({"train_dataset": learnable(80, 3)}, "data.fingerprint: saved '"),
        ({"candidates": CANDIDATES[:3]}, "another tuning: candidate impossible: saved 'hmc', now None. Choose"),
        (
            {"candidates": [*CANDIDATES[:2], CANDIDATES[2]._replace(learning_rate=0.1), CANDIDATES[3]]},
            "another tuning: candidate ensemble.learning_rate: saved 0.03, now 0.1. Choose",
        ),
        ({"model": tiny_bert(seed=1)}, "base.weights: saved '"),
        ({"model": another_head()}, "another tuning: the weights where runs start (a new head or adapter is random"),
        ({"subspace": "classifier.weight"}, "parameters: saved [["),
        ({"settings": {"num_data": 70}}, "num_data: saved 80.0, now 70.0. Choose"),
        ({"settings": {"gradient_accumulation_steps": 2}, "budget": 8000}, "micro_batches: saved 1, now 2"),
        ({"settings": {"per_device_train_batch_size": 4}}, "rows in an update (per_device_train_batch_size,"),
        ({"settings": {"minibatch": "shared"}}, "minibatch: saved 'independent', now 'shared'. Choose"),
        ({"settings": {"bf16": True}}, "precision.autocast: saved 'no', now 'bf16'. Choose"),
        ({"settings": {"calibrate": False}}, "calibrate: saved True, now False. Choose"),
        (
            {"settings": {"dataloader_drop_last": True, "per_device_eval_batch_size": 150}},
            "held-out rows that dataloader_drop_last leaves out: saved None, now 50. Choose",
        ),
        ({"settings": {"seed": 3}}, "seed: saved 42, now 3"),
        ({"settings": {"lr_scheduler_type": "linear"}}, "lr_scheduler_type: saved 'constant', now 'linear'. Choose"),
    ],
)
def test_another_tuning_is_refused_by_what_differs(
    tuned: tuple[Path, Tuning], changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match="record of .*" + re.escape(words)):
        call(tuned[0], **changes)


def test_dropped_batches_differ_only_if_rows_are_left_out(
    tuned: tuple[Path, Tuning], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, result = tuned
    only_failing(monkeypatch, ValueError("still impossible"), "hmc")
    assert call(directory, settings={"dataloader_drop_last": True}).chosen == result.chosen  # two batches of 100


def test_without_a_collator_it_is_that_of_the_trainer(
    tuned: tuple[Path, Tuning], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, result = tuned
    only_failing(monkeypatch, ValueError("still impossible"), "hmc")
    assert call(directory, data_collator=None).chosen == result.chosen


def test_with_a_tokenizer_rows_are_padded(tmp_path: Path) -> None:
    ragged = Dataset.from_list([
        {"input_ids": [5 + row % 9] * (2 + row % 3), "labels": row % 2} for row in range(200)
    ])  # fmt: skip
    data = {"train_dataset": ragged, "eval_dataset": ragged, "data_collator": None}
    result = call(tmp_path, CANDIDATES[1:2], budget=200, processing_class=tiny_tokenizer(), **data)
    assert not any(trial.failure for trial in result.kept)


def test_preparing_draws_no_numbers_of_a_collator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Random:
        def __init__(self) -> None:
            self.generator = torch.Generator().manual_seed(0)

        def __call__(self, rows: Any) -> Any:
            torch.rand(1, generator=self.generator)
            return default_data_collator(rows)

    collator = Random()
    before, states = collator.generator.get_state(), []

    def run(*args: Any, **options: Any) -> Any:
        states.append(collator.generator.get_state())
        raise ValueError("not run")

    monkeypatch.setattr(trials_module, "finished_run", run)
    with pytest.raises(ValueError, match="no candidate ran to its end"):
        call(tmp_path, CANDIDATES[:1], data_collator=collator)
    assert torch.equal(states[0], before)
