"""The help of a command: its arguments by group, one line for each, or all of them in full.

The words of an argument are the metadata of its field in a dataclass, so they are written once.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import textwrap
import types
import typing
from collections.abc import Iterator
from typing import Any

from hf_bayes.cli.command import Command

WIDTH = 118
INDENT = 36
"""The column at which the words begin. A longer name has its words on the next line."""

OWN = {
    "learning_rate": "Step size, in SGD's meaning; without a method, AdamW's. Default: the run finds it.",
    "lr_scheduler_type": "Schedule of the step size.",
    "num_data": "N, the number of likelihood terms. Default: counted in the data.",
    "data_unit": "One likelihood term of a language model.",
    "minibatch": "Minibatches of each chain's own, or one for all.",
    "members_per_pass": "Members computed together in one pass. Default: chosen for speed.",
    "trunk_memory_gib": "GiB of memory for the outputs of the frozen first layers.",
    "map_updates": "Updates of the MAP estimate to compare with. 0: none.",
    "calibrate": "Fit a temperature of the predictions on held-out rows. Default: where possible.",
    "probe_steps": "Updates between two checks of the chains' convergence. 0: none.",
    "noise_std": "Standard deviation of the noise of labels that are numbers. Default: learnt from held-out rows.",
    "private_rows": "Rows stay in the process that has them.",
}
"""Our training arguments -> their words in the short help."""

COMMON = {
    "output_dir": "Folder of the posterior and of the checkpoints.",
    "num_train_epochs": "Passes over the training data.",
    "max_steps": "Updates, in place of epochs. -1: as many as the epochs have.",
    "per_device_train_batch_size": "Rows of a minibatch.",
    "per_device_eval_batch_size": "Rows of a batch of held-out rows.",
    "gradient_accumulation_steps": "Minibatches of an update.",
    "bf16": "Compute in bfloat16. The state of the chains stays float32.",
    "gradient_checkpointing": "Keep fewer activations: less memory, more time.",
    "seed": "Seed of the run.",
    "eval_strategy": "When to evaluate during training: no, steps or epoch.",
    "save_strategy": "When to write checkpoints: no, steps or epoch.",
    "save_steps": "Updates between two checkpoints.",
    "resume_from_checkpoint": "A checkpoint to continue from, or true for the newest in output_dir.",
    "logging_steps": "Updates between two logged losses.",
    "report_to": "Trackers such as tensorboard or wandb.",
    "log_level": "info shows the messages and logs of the run.",
    "use_cpu": "Stay on the CPU.",
    "push_to_hub": "Upload the posterior at the end.",
    "hub_model_id": "Its repository, such as user/name.",
}
"""transformers' arguments that the short help lists -> their words."""

FOOTER = """
--help-all       all arguments, transformers' too, in full
--traceback      show the traceback of an error"""


def help_text(name: str, command: Command, *, everything: bool = False) -> str:
    """Return the help of a command.

    Args:
        everything: True lists all arguments with all their words. False lists our arguments and ``COMMON``, a line for
            each. Arguments that a run would refuse, or the command does not use, are in neither.
    """
    first = "FILE" if command.first is None else f"{command.first.upper()} | FILE"
    lines = [
        f"usage: hf-bayes {name} [{first}] [--NAME VALUE ...]",
        "",
        inspect.getdoc(command.run).split("\n\n")[0].replace("\n", " "),  # type: ignore[union-attr]
        "FILE is a YAML or JSON mapping of names to values; a value on the command line takes precedence.",
        "",
        f"    hf-bayes {command.example}",
    ]
    for title, fields in _groups(command, everything=everything):
        lines += ["", f"{title}:"]
        for each, kind, words in fields:
            lines += _entry(each, kind, words, wrap=everything)
    return "\n".join([*lines, FOOTER])


Entry = tuple[dataclasses.Field[Any], Any, str]
"""A field, its type and its words."""


def _groups(command: Command, *, everything: bool) -> Iterator[tuple[str, list[Entry]]]:
    """Yield the title and the arguments of each group."""
    for kind in command.arguments:
        hints = typing.get_type_hints(kind)
        entries = [(each, hints[each.name], each.metadata.get("help", "")) for each in dataclasses.fields(kind)]
        own = [entry for entry in entries if _is_own(kind, entry[0].name)]
        if len(own) == len(entries):
            yield getattr(kind, "_argument_group_name", "arguments"), own
            continue
        from hf_bayes.training.checks.arguments import REFUSED  # it imports torch and transformers

        listed = [entry for entry in entries if entry[0].name not in REFUSED | command.unused]
        own = [entry for entry in own if entry in listed]
        others = [entry for entry in listed if entry not in own]
        if everything:
            yield "training", own
            yield "training, by transformers", others
        else:
            yield "training", _renamed(own, OWN)
            yield "training, by transformers (--help-all lists the others)", _renamed(others, COMMON)


def _renamed(entries: list[Entry], words: dict[str, str]) -> list[Entry]:
    """Return the arguments that have words here, with these words and in their order."""
    found = {entry[0].name: entry for entry in entries}
    return [(*found[name][:2], text) for name, text in words.items() if name in found]


def _is_own(kind: type[Any], name: str) -> bool:
    """Return whether a class of ours declares the field, in place of a class of transformers."""
    ours = (base for base in kind.__mro__ if base.__module__.partition(".")[0] != "transformers")
    return any(name in inspect.get_annotations(base) for base in ours)


def _entry(field: dataclasses.Field[Any], kind: Any, words: str, *, wrap: bool) -> list[str]:
    """Return the lines of an argument: its name, its values, its words and its default."""
    name = f"  --{field.name} {_values(kind)}".rstrip()
    words, default = " ".join(words.replace("%%", "%").split()), _default(field)
    room = WIDTH - INDENT
    wrapped = textwrap.wrap(words + default, room) if wrap else [_shortened(words, room - len(default)) + default]
    indented = [" " * INDENT + line for line in wrapped] or [""]
    if len(name) < INDENT - 1:
        return [f"{name:{INDENT}}{indented[0].strip()}".rstrip(), *indented[1:]]
    return [name, *indented]


def _values(kind: Any) -> str:
    """Return the values that an argument of this type takes, in a word."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        kinds = [each for each in typing.get_args(kind) if each is not types.NoneType]
        kind = next((each for each in kinds if typing.get_origin(each) is dict or each is dict), kinds[0])
    origin = typing.get_origin(kind)
    if origin is typing.Literal:
        return "|".join(map(str, typing.get_args(kind)))
    if origin is list:
        return f"{_values(typing.get_args(kind)[0])} ..."
    if origin is dict or kind is dict:
        return "JSON"
    return {bool: "BOOL", int: "N", float: "X"}.get(kind, "TEXT")


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is dataclasses.MISSING:
        return " (required)" if field.default_factory is dataclasses.MISSING else ""
    value = getattr(field.default, "value", field.default)
    return "" if value is None or value == "" else f" [{str(value).lower() if isinstance(value, bool) else value}]"


def _shortened(words: str, room: int) -> str:
    """Return as many sentences as there is room for, at least one."""
    sentences = re.split(r"(?<=\.)\s", words)
    kept = sentences[0]
    for each in sentences[1:]:
        if len(kept) + 1 + len(each) > room:
            break
        kept = f"{kept} {each}"
    return kept
