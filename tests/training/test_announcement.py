from __future__ import annotations

import logging
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_bayes import HMCConfig, MAPConfig, MCDropoutConfig
from hf_bayes.training.active_run import ActiveRun
from hf_bayes.training.announcement import announce, rows_vary
from hf_bayes.training.compat import TrainerHost
from tests import runs
from tests.runs import token_rows
from tests.tiny_models import tiny_llama, with_lora
from tests.training.diagnosed import ONE_DRAW, run


class Augmented(torch.utils.data.Dataset):
    """Rows whose tokens are drawn anew at each look."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**token_rows(1)[0], "input_ids": torch.randint(3, 100, (8,)).tolist()}


def test_dropout_and_augmentation_warn_of_another_posterior(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "hf_bayes.training.trainer"):
        run(tmp_path, ONE_DRAW, max_steps=1)
        assert "Jensen" not in caplog.text
        run(tmp_path, ONE_DRAW, max_steps=1, train=Augmented())
        assert "rows of train_dataset differ from one look to the next" in caplog.text
        caplog.clear()
        run(tmp_path, ONE_DRAW, max_steps=1, model=with_lora(tiny_llama(), lora_dropout=0.1))
        assert "the model has dropout" in caplog.text
        assert "Jensen" in caplog.text


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (ONE_DRAW, "this is the posterior of the dropout-averaged log-likelihood"),
        (HMCConfig(num_chains=2), "hmc evaluates it without"),
        (MAPConfig(), "this run optimises the log-likelihood averaged over its masks"),
        (MCDropoutConfig(), "inputs are dropped twice. Set it to 0"),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_dropout_is_spoken_of_as_each_method_meets_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, config: Any, words: str
) -> None:
    trainer = runs.trainer(tmp_path, config, model=with_lora(tiny_llama(), lora_dropout=0.1))
    active = ActiveRun(TrainerHost(trainer), trainer.setup, trainer.rows)
    with caplog.at_level(logging.INFO, "hf_bayes.training.trainer"), warnings.catch_warnings():
        warnings.simplefilter("error")
        announce(active)
    assert words in caplog.text
    assert ("Jensen" in caplog.text) == ("MCDropoutConfig" in caplog.text) == (config is ONE_DRAW)


class Reversed(Augmented):
    """Rows that are read backwards half of the time."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = token_rows(8)[index]
        return {**row, "input_ids": row["input_ids"][:: random.choice((1, -1))]}


def test_augmentation_that_spares_half_of_the_rows_is_noticed(tmp_path: Path) -> None:
    trainer = runs.trainer(tmp_path, ONE_DRAW, train=Reversed())
    active = ActiveRun(TrainerHost(trainer), trainer.setup, trainer.rows)
    assert all(rows_vary(active) for _ in range(20))  # 8 rows alike in 4 looks: 6e-8
