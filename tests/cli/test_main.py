from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hf_bayes.cli import main as module
from hf_bayes.cli.commands import diagnose
from hf_bayes.cli.main import COMMANDS, main

ROOT = Path(__file__).parents[2]


def test_every_command_has_a_module_and_a_line_of_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == main([]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown for name in COMMANDS)
    modules = {path.stem for path in (ROOT / "hf_bayes" / "cli" / "commands").glob("*.py")}
    assert modules - {"__init__"} == COMMANDS.keys()


def test_the_help_of_all_commands_imports_no_torch() -> None:
    program = (
        "import sys; from hf_bayes.cli.main import main; main(['--help'])\n"
        "print([name for name in ('torch', 'transformers', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["trian"], "hf-bayes: there is no command 'trian', expected one of train, classify,"),
        (["diagnose"], "hf-bayes diagnose: the following arguments are required: --posterior"),
        (["diagnose", "out", "--figure", "x.png"], "hf-bayes diagnose: '--figure' is no argument of this command"),
        (["diagnose", "missing.yaml"], "hf-bayes diagnose: missing.yaml: no such file or directory"),
    ],
)
def test_wrong_input_ends_in_a_sentence_and_status_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(words)
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def raising(error: BaseException) -> Any:
    def run(*_: object) -> None:
        raise error

    return diagnose.COMMAND._replace(run=run)


def test_the_traceback_is_shown_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnose, "COMMAND", raising(ValueError("wrong")))
    with pytest.raises(ValueError, match="wrong"):
        main(["diagnose", "out", "--traceback"])


def test_a_fault_of_the_program_shows_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnose, "COMMAND", raising(KeyError("fault")))
    with pytest.raises(KeyError):
        main(["diagnose", "out"])


@pytest.mark.parametrize("sentence", ["print('a line')", "print(10**6 * 'x')", "Console().print(Text(10**5 * 'x '))"])
def test_a_reader_that_has_ended_is_no_error(sentence: str, tmp_path: Path) -> None:
    program = f"""
import sys
from rich.console import Console
from rich.text import Text
from hf_bayes.cli import main as module
def run(*_):
    {sentence}
module._run = run
sys.exit(module.main(["diagnose", "out"]))
"""
    reading, writing = os.pipe()
    os.close(reading)
    buffered = {**os.environ, "PYTHONUNBUFFERED": ""}
    with os.fdopen(writing, "wb") as closed:
        done = subprocess.run(
            [sys.executable, "-c", program], cwd=tmp_path, env=buffered, stdout=closed, stderr=subprocess.PIPE
        )
    assert (done.returncode, done.stderr) == (1, b"")


def test_another_broken_pipe_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(diagnose, "COMMAND", raising(BrokenPipeError(32, "Broken pipe")))
    assert main(["diagnose", "out"]) == 2
    assert capsys.readouterr().err == "hf-bayes diagnose: [Errno 32] Broken pipe\n"
    with pytest.raises(BrokenPipeError):
        main(["diagnose", "out", "--traceback"])


def test_an_interrupted_command_has_status_130(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnose, "COMMAND", raising(KeyboardInterrupt()))
    assert main(["diagnose", "out"]) == 130


def test_an_interrupted_run_says_how_to_continue_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = raising(KeyboardInterrupt())._replace(continuing=lambda *parsed: f"Continue {parsed[0].posterior}.")
    monkeypatch.setattr(diagnose, "COMMAND", command)
    assert main(["diagnose", "out"]) == 130
    assert capsys.readouterr() == ("", "hf-bayes diagnose: interrupted. Continue out.\n")
    monkeypatch.setenv("RANK", "1")  # of the processes of a launch, the first one speaks
    assert main(["diagnose", "out"]) == 130
    assert capsys.readouterr() == ("", "")


def test_only_the_first_line_of_an_error_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(diagnose, "COMMAND", raising(OSError("no \x1b[31mmodel\nmuch advice")))
    assert main(["diagnose", "out"]) == 2
    assert capsys.readouterr().err == "hf-bayes diagnose: no U+001B[31mmodel (--traceback shows the rest)\n"


def test_a_quoted_reason_is_shown_whole(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    error = OSError("no model here (no hub\nno network). More")
    error.__cause__ = OSError("no hub\nno network")
    monkeypatch.setattr(diagnose, "COMMAND", raising(error))
    assert main(["diagnose", "out"]) == 2
    assert capsys.readouterr().err == "hf-bayes diagnose: no model here (no hub no network). More\n"


@pytest.mark.parametrize(
    ("advice", "shown"),
    [
        ("give it as output= (no file)", "give it as --output (no file)"),
        ("give it as output=.", "give it as --output."),
        ("give it as output= (--output)", "give it as output= (--output)"),
        ("give it as other=", "give it as other="),
        ("got output=3, draw(output=...)", "got output=3, draw(output=...)"),
        ("got 'output= 3', /data/output=.csv", "got 'output= 3', /data/output=.csv"),
    ],
)
def test_advice_names_the_flag_of_an_argument(
    advice: str, shown: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(diagnose, "COMMAND", raising(ValueError(advice)))
    assert main(["diagnose", "out"]) == 2
    assert capsys.readouterr().err == f"hf-bayes diagnose: {shown}\n"


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == module.hf_bayes.__version__
