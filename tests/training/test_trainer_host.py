from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from accelerate import Accelerator
from torch import nn
from transformers import DataCollatorWithPadding, LlamaForSequenceClassification, Trainer

from hf_bayes.methods.averaging.ensemble import EnsembleConfig
from hf_bayes.training.arguments import BayesianTrainingArguments
from hf_bayes.training.trainer_host import TrainerHost, expected_updates, logger, without_data_parallel
from tests import runs
from tests.tiny_models import tiny_llama, tiny_tokenizer


def host_of(*, disable_tqdm: bool = False, first: bool = True) -> TrainerHost:
    trainer: Any = SimpleNamespace(args=SimpleNamespace(disable_tqdm=disable_tqdm), is_world_process_zero=lambda: first)
    return TrainerHost(trainer)


@pytest.mark.parametrize(
    ("given", "expected"),
    [(None, {"": None}), ([1], {"": [1]}), ({"a": [1], "heldout": [2]}, {"a": [1], "heldout": [2]})],
)
def test_held_out_sets_have_names_and_a_single_one_has_none(given: Any, expected: dict[str, Any]) -> None:
    trainer: Any = SimpleNamespace(eval_dataset=given)
    assert TrainerHost(trainer).eval_sets == expected


@pytest.mark.parametrize(
    ("level", "disable_tqdm", "first", "where"),
    [
        (logging.INFO, False, True, "log"),
        (logging.WARNING, False, True, "bar"),
        (logging.WARNING, True, True, ""),
        (logging.WARNING, False, False, ""),
    ],
)
def test_a_message_is_shown_in_the_log_or_beside_the_bar(
    level: int,
    disable_tqdm: bool,
    first: bool,
    where: str,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with caplog.at_level(level, logger=logger.name):
        host_of(disable_tqdm=disable_tqdm, first=first).say("%d chains", 3)
    assert caplog.messages == (["3 chains"] if where == "log" else [])
    assert capsys.readouterr().err == ("3 chains\n" if where == "bar" else "")


@pytest.mark.parametrize("first", [True, False])
def test_the_first_process_alone_warns(first: bool, caplog: pytest.LogCaptureFixture) -> None:
    host_of(first=first).warn("R-hat %.1f", 1.3)
    assert caplog.messages == (["R-hat 1.3"] if first else [])


def test_no_model_is_wrapped_in_data_parallel() -> None:
    accelerator, seen = Accelerator(cpu=True), []

    def prepare_model(model: Any, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
        seen.append((model, device_placement, evaluation_mode))
        return model

    accelerator.prepare_model = prepare_model
    without_data_parallel(accelerator)
    model = nn.Linear(1, 1)
    assert accelerator.prepare_model(model, False) is model
    assert seen == [(model, False, True)]  # accelerate wraps no model that is prepared for evaluation


@pytest.mark.parametrize(
    ("rows", "changes"),
    [
        (range(21), {"num_train_epochs": 2.5, "per_device_train_batch_size": 4}),
        (range(21), {"num_train_epochs": 3, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}),
        (range(21), {"max_steps": 7}),
    ],
)
def test_expected_updates_are_those_of_trainer(tmp_path: Path, rows: Any, changes: dict[str, Any]) -> None:
    args = BayesianTrainingArguments(output_dir=str(tmp_path), **changes)
    host = Trainer(nn.Linear(1, 1), args, train_dataset=list(rows))
    planned = host.set_initial_training_values(args, host.get_train_dataloader())
    assert expected_updates(args, rows) == planned[-1]
    assert expected_updates(None, rows) is None
    if args.max_steps < 0:
        assert expected_updates(args, iter(rows)) is None


def test_a_decoder_that_classifies_knows_its_padding(tmp_path: Path) -> None:
    base = LlamaForSequenceClassification(tiny_llama(num_labels=3).config)
    base.config.pad_token_id, tokenizer = None, tiny_tokenizer()
    trainer = runs.trainer(
        tmp_path, EnsembleConfig(num_chains=2), model=base, subspace="last_layer", train=runs.label_rows(4),
        eval_dataset=runs.label_rows(4), collator=DataCollatorWithPadding(tokenizer), processing_class=tokenizer,
    )  # fmt: skip
    assert base.config.pad_token_id == tokenizer.pad_token_id
    assert trainer.evaluate()["eval_nll"] > 0
    trainer.train()
