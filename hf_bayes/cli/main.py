"""The command ``hf-bayes``: find the command, parse its arguments, run it, and say in a sentence what went wrong.

A command's module is imported when the command is given, so that ``hf-bayes --help`` needs neither torch nor
transformers.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import hf_bayes
from hf_bayes.cli.quiet import hidden_bars, quiet_libraries
from hf_bayes.core.text_safety import readable_errors

if TYPE_CHECKING:
    from hf_bayes.cli.command import Command

COMMANDS = {
    "train": "fine-tune a causal language model into a posterior",
    "classify": "fine-tune a classifier or a regression of texts into a posterior",
    "continual": "learn texts one after another, each posterior the prior of the next",
    "tune": "compare methods on held-out rows within a budget, and save the best posterior",
    "bayesianise": "make a posterior of a finished LoRA adapter from held-out rows, without training",
    "evaluate": "measure scores, calibration and the detection of other inputs",
    "score": "show the uncertainty of each token of a text",
    "generate": "continue a prompt and show the uncertainty of each token",
    "diagnose": "show whether the chains of a run converged",
    "export": "write a posterior for transformers or peft alone, or a Space",
    "demo": "start a page that streams text with its uncertainty",
}
"""The name of a command, which is the name of its module in ``cli.commands`` -> its work in words."""

WRONG_INPUT = (ValueError, OSError, ImportError, FloatingPointError)
"""The errors that end a command with a sentence and the status 2. Any other error is a fault and shows a traceback."""

_ARGUMENT = re.compile(r"(?<![\w\-'\"/,])([a-z]\w*)=(?! \(--)(?=[\s,;:)]|\.(?!\.)|$)")
"""The pattern of an argument in an error's advice, such as ``base_model=``: no value follows, and no flag in brackets.

It does not begin after a quotation mark, a slash or a comma, as in the text of a user or the name of a file.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, by default ``sys.argv[1:]``, and return the exit status."""
    try:
        status = _status(list(sys.argv[1:] if arguments is None else arguments))
        sys.stdout.flush()  # a reader that has ended is noticed here, and not when Python shuts down
    except BrokenPipeError:
        if _has_reader():
            raise
        # The reader, such as head, has what it wanted. Python would write the rest when it shuts down, and rich gives
        # the same status (Python's documentation, "Note on SIGPIPE").
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return status


def _status(given: list[str]) -> int:
    """Run a command line, and return the exit status."""
    traceback = "--traceback" in given
    given = [word for word in given if word != "--traceback"]
    if not given or given[0] in ("-h", "--help"):
        print(_overview())
        return 0
    if given[0] == "--version":
        print(hf_bayes.__version__)
        return 0
    name, *rest = given
    if name not in COMMANDS:
        print(f"hf-bayes: there is no command {name!r}, expected one of {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    try:
        with readable_errors(), quiet_libraries():
            _run(name, rest)
    except WRONG_INPUT as error:
        if traceback or (isinstance(error, BrokenPipeError) and not _has_reader()):
            raise
        print(f"hf-bayes {name}: {_with_flags(_sentence(error), name)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    finally:
        _end_processes()
    return 0


def _has_reader() -> bool:
    """Check by an empty line whether the output is read: the pipe of another process may have broken."""
    try:
        print(flush=True)
    except BrokenPipeError:
        return False
    return True


def _run(name: str, given: list[str]) -> None:
    from hf_bayes.cli.help import help_text
    from hf_bayes.cli.parsing import parse_arguments

    command: Command = importlib.import_module(f"hf_bayes.cli.commands.{name}").COMMAND
    everything = "--help-all" in given
    if everything or {"-h", "--help"} & set(given):
        print(help_text(name, command, everything=everything))
        return
    parsed = parse_arguments(*command.arguments, arguments=given, first=command.first)
    try:
        with hidden_bars():
            command.run(*parsed)
    except KeyboardInterrupt:
        if command.continuing is not None and int(os.environ.get("RANK", 0)) == 0:  # of the processes of a launch
            start = "\n" if sys.stderr.isatty() else ""  # a bar ends without a new line
            print(f"{start}hf-bayes {name}: interrupted. {command.continuing(*parsed)}", file=sys.stderr)
        raise


def _overview() -> str:
    width = max(map(len, COMMANDS))
    return "\n".join(
        [
            "usage: hf-bayes COMMAND [FILE.yaml] [--NAME VALUE ...]",
            "",
            "Fine-tune Hugging Face models into posteriors, and use the uncertainty of their predictions.",
            "",
            *(f"  {name:{width}}  {words}" for name, words in COMMANDS.items()),
            "",
            "hf-bayes COMMAND --help lists the arguments of a command. On several devices, start it with",
            "accelerate launch -m hf_bayes.cli COMMAND ...",
        ]
    )


def _sentence(error: BaseException) -> str:
    """Return the first line of an error, and how to see the rest."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:  # without "[Errno 2]"
        named = str(error.filename) in error.strerror
        return error.strerror if named else f"{error.filename or repr('')}: {error.strerror.lower()}"
    text, reason = str(error).strip(), str(error.__cause__ or "").strip()
    # a sentence goes on after the reason that it quotes, which may have several lines
    text = text.replace(f"({reason})", f"({' '.join(reason.split())})")
    lines = text.splitlines() or [type(error).__name__]
    return lines[0] if len(lines) == 1 else f"{lines[0]} (--traceback shows the rest)"


def _with_flags(sentence: str, name: str) -> str:
    """Return an error's sentence with flags of the command, as --base_model, in place of arguments of Python."""
    command = getattr(sys.modules.get(f"hf_bayes.cli.commands.{name}"), "COMMAND", None)
    flags = {field.name for group in command.arguments for field in dataclasses.fields(group)} if command else set()
    return _ARGUMENT.sub(lambda match: f"--{match[1]}" if match[1] in flags else match[0], sentence)


def _end_processes() -> None:
    """End the process group of a launch, see ``end_process_group``, if this process has one."""
    scripts = sys.modules.get("hf_bayes.cli.scripts")
    if scripts is not None:
        scripts.end_process_group()
