"""Tiny models, texts and settings on which the training commands run in seconds."""

from __future__ import annotations

import importlib
from pathlib import Path

import yaml

from hf_bayes.cli.parsing import parse_arguments

FIELDS = {
    "lora_rank": 2,
    "method": "sghmc",
    "method_args": {"num_chains": 2, "prior_std": 0.1},
    "learning_rate": 1e-3,
    "max_steps": 3,
    "per_device_train_batch_size": 4,
    "use_cpu": True,
    "disable_tqdm": True,
}


def run(command: str, *arguments: str) -> None:
    """Run a command in this process."""
    found = importlib.import_module(f"hf_bayes.cli.commands.{command}").COMMAND
    found.run(*parse_arguments(*found.arguments, arguments=arguments, first=found.first))


def config_file(path: Path, **fields: object) -> str:
    """Write a file with ``FIELDS`` and these fields, without those that are None, and return its name."""
    path.write_text(yaml.safe_dump({name: value for name, value in {**FIELDS, **fields}.items() if value is not None}))
    return str(path)
