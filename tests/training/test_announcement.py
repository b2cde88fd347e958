from __future__ import annotations

import logging
import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_bayes import HMCConfig, MAPConfig, MCDropoutConfig, MeanFieldConfig, SGHMCConfig
from hf_bayes.training import announcement
from hf_bayes.training.active_run import ActiveRun
from hf_bayes.training.announcement import announce
from hf_bayes.training.trainer_host import TrainerHost
from tests import runs
from tests.runs import token_rows
from tests.tiny_models import tiny_llama, with_lora
from tests.training.diagnosed import ONE_DRAW, run

LADDER = SGHMCConfig(num_chains=2, ladder={"temperature": [1, 0.1]})


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
        assert "rows of train_dataset differ each time they are read" in caplog.text
        caplog.clear()
        run(tmp_path, ONE_DRAW, max_steps=1, model=with_lora(tiny_llama(), lora_dropout=0.1))
        assert "the model has dropout" in caplog.text
        assert "Jensen" in caplog.text


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (ONE_DRAW, "this is the posterior of the dropout-averaged log-likelihood"),
        (replace(ONE_DRAW, temperature=0.1), "this run samples by the log-likelihood averaged over its masks"),
        (LADDER, "this run samples by the log-likelihood averaged over its masks"),
        (HMCConfig(num_chains=2), "hmc evaluates it without"),
        (MAPConfig(), "this run optimises the log-likelihood averaged over its masks"),
        (MCDropoutConfig(), "inputs are dropped twice. Set it to 0"),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_dropout_is_spoken_of_as_each_method_meets_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, config: Any, words: str
) -> None:
    changes = {"max_steps": 40, "eval_dataset": runs.token_rows(40)} if config is LADDER else {}
    trainer = runs.trainer(tmp_path, config, model=with_lora(tiny_llama(), lora_dropout=0.1), **changes)
    active = ActiveRun(TrainerHost(trainer), trainer.setup, trainer.rows)
    with caplog.at_level(logging.INFO, "hf_bayes.training.trainer"), warnings.catch_warnings():
        warnings.simplefilter("error")
        announce(active)
    assert words in caplog.text
    assert ("Jensen" in caplog.text) == ("has dropout (lora_dropout 0.1)" in caplog.text) == (config is ONE_DRAW)


def test_noise_of_a_router_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(tmp_path, ONE_DRAW, max_steps=1, model=with_lora(tiny_llama(router_jitter_noise=0.2)))
    assert "has dropout (router_jitter_noise 0.2)" in caplog.text


def prior_announced(folder: Path, caplog: pytest.LogCaptureFixture, **settings: Any) -> re.Match[str] | None:
    """Return what is said about the prior of a LoRA: its kind, and the number that is advised."""
    caplog.clear()
    trainer = runs.trainer(folder, MAPConfig(**settings), model=with_lora(tiny_llama()))
    with caplog.at_level(logging.INFO, "hf_bayes.training.trainer"):
        announce(ActiveRun(TrainerHost(trainer), trainer.setup, trainer.rows))
    return re.search(r"the prior is (\w+): .* RMS, and .*(?:Set prior_std (?:below|near)|by) (\S+?),? ", caplog.text)


FACTORS = {"lora_A": 1.0, "lora_B": 4.0}


@pytest.mark.parametrize(
    ("prior_std", "kind"),
    [(1.0, "wide"), (FACTORS, "wide"), (1e-4, "narrow"), (dict.fromkeys(FACTORS, 1e-4), "narrow")],
)
def test_an_unusual_prior_is_announced_with_a_usual_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, prior_std: Any, kind: str
) -> None:
    found = prior_announced(tmp_path, caplog, prior_std=prior_std)
    assert found is not None
    assert found[1] == kind
    number = 0.97 * float(found[2])  # it was rounded to two digits
    usual = {name: std * number for name, std in prior_std.items()} if isinstance(prior_std, dict) else number
    assert prior_announced(tmp_path, caplog, prior_std=usual) is None


def test_the_default_prior_is_not_announced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert prior_announced(tmp_path, caplog) is None
    assert "prior" not in caplog.text
    found = prior_announced(tmp_path, caplog, prior="he")
    assert found is not None
    assert found[1] == "wide"


def test_time_and_memory_count_every_gradient_of_an_update(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(announcement, "_time_one_micro_batch", lambda active: 10.0)
    times, sizes, operations = [], [], []
    for num_draws in (1, 2):
        trainer = runs.trainer(tmp_path, MeanFieldConfig(num_draws=num_draws), max_steps=6)
        active = ActiveRun(TrainerHost(trainer), trainer.setup, trainer.rows)
        caplog.clear()
        with caplog.at_level(logging.INFO, "hf_bayes.training.trainer"):
            announce(active)
        found = re.search(r"about (\d) min 0 s for 6 updates of 1 micro-batch(.*?); (\S+) MB", caplog.text)
        assert found is not None
        assert found[2] == ("" if num_draws == 1 else " with 2 gradients each")
        times.append(int(found[1]))
        sizes.append(float(found[3]))
        operations.append(active.floating_point_ops(next(iter(trainer.rows.loader()))))
    assert times == [1, 2]
    assert operations[1] == 2 * operations[0]
    copies = trainer.bayesian.layout.dim * 4 / 2**20
    assert sizes[1] - sizes[0] == pytest.approx(2 * copies, abs=0.1)  # the second point and its gradient; rounded
