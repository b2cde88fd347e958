from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from hf_bayes.training.messages import Messages, logger


def host(*, disable_tqdm: bool = False, first: bool = True) -> Any:
    return SimpleNamespace(args=SimpleNamespace(disable_tqdm=disable_tqdm), is_first_process=first)


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
        Messages(host(disable_tqdm=disable_tqdm, first=first)).say("%d chains", 3)
    assert caplog.messages == (["3 chains"] if where == "log" else [])
    assert capsys.readouterr().err == ("3 chains\n" if where == "bar" else "")


@pytest.mark.parametrize("first", [True, False])
def test_the_first_process_alone_warns(first: bool, caplog: pytest.LogCaptureFixture) -> None:
    Messages(host(first=first)).warn("R-hat %.1f", 1.3)
    assert caplog.messages == (["R-hat 1.3"] if first else [])
