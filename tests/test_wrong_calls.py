"""Wrong calls of ``hf-bayes``, row by row: each ends in one sentence without a traceback, and leaves no output."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest

from hf_bayes.cli.main import main
from tests.bad_input.calls import CALLS, Call, write_files


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place, before = tmp_path_factory.mktemp("calls"), Path.cwd()
    os.chdir(place)
    try:
        write_files()
    finally:
        os.chdir(before)
    return place


@pytest.mark.filterwarnings("ignore:.*did not converge")  # a warning is no error, and comes before it
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.line.replace("/", "|"))
def test_a_wrong_call_ends_in_one_sentence(
    folder: Path, call: Call, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    assert main(shlex.split(call.line)) == 2
    said = capsys.readouterr().err.strip()
    assert "\n" not in said
    assert said.startswith(f"hf-bayes {call.line.split()[0]}: ")
    assert "--traceback" not in said  # the first line says it all
    assert [word for word in call.words if word not in said] == [], said
    assert not (folder / "out").exists()
