from __future__ import annotations

import logging
from pathlib import Path

import pytest
from transformers import PrinterCallback, ProgressCallback

from hf_bayes.cli.progress import OneBar, one_bar, without_messages
from hf_bayes.methods.averaging.map import MAPConfig
from tests import runs


@pytest.mark.parametrize("disable", [True, False])
def test_a_quiet_run_shows_one_bar_or_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], disable: bool
) -> None:
    options = {"disable_tqdm": disable, "logging_steps": 1, "learning_rate": 1e-3, "map_updates": 0}
    trainer = runs.trainer(tmp_path, MAPConfig(), eval_dataset=runs.token_rows(4, seed=1), **options)
    one_bar(trainer)
    kinds = [type(each) for each in trainer.callback_handler.callbacks]
    assert not {PrinterCallback, ProgressCallback} & set(kinds)
    assert (OneBar in kinds) is not disable
    with without_messages():
        trainer.train()
        trainer.evaluate()
    captured = capsys.readouterr()
    assert captured.out == ""
    last = captured.err.replace("\r", "\n").rstrip().rpartition("\n")[2]
    assert ("loss" in captured.err) is not disable
    assert "{" not in captured.err
    assert last == "" or "held-out rows" in captured.err


def test_messages_return_after_the_block() -> None:
    logger = logging.getLogger("hf_bayes.training.trainer")
    before = logger.level
    with without_messages():
        assert logger.isEnabledFor(logging.INFO)
    assert logger.level == before
