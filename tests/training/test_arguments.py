from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainingArguments

from hf_bayes import BayesianTrainingArguments


@dataclass
class HostConfig(TrainingArguments):
    """The config of another library's trainer, with a default of every kind."""

    max_length: int = 1024
    logging_steps: float = 10
    columns: list[str] = field(default_factory=lambda: ["text"])


class Plain(BayesianTrainingArguments, HostConfig): ...


@dataclass
class Decorated(BayesianTrainingArguments, HostConfig):
    own: int = field(default=3, metadata={"help": "A field that is added."})
    names: list[str] = field(default_factory=list)


@pytest.mark.parametrize("kind", [Plain, Decorated])
def test_arguments_joined_with_another_config_take_both(tmp_path: Path, kind: Any) -> None:
    args = kind(output_dir=str(tmp_path), max_length=24, probe_steps=7, use_cpu=True)
    assert (args.max_length, args.probe_steps, args.columns) == (24, 7, ["text"])
    assert (args.max_grad_norm, args.lr_scheduler_type) == (0.0, "constant")  # a sampler's defaults win


def test_a_joined_class_keeps_the_fields_it_adds(tmp_path: Path) -> None:
    args = Decorated(output_dir=str(tmp_path), use_cpu=True, own=4)
    assert (args.own, args.names) == (4, [])
    assert Decorated.__dataclass_fields__["own"].metadata["help"]


def test_joined_arguments_are_checked_by_both(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="probe_steps must be >= 0, got -1"):
        Plain(output_dir=str(tmp_path), probe_steps=-1, use_cpu=True)


def test_an_access_token_is_not_printed(tmp_path: Path) -> None:
    args = BayesianTrainingArguments(str(tmp_path), hub_token="hf_secret", use_cpu=True)
    assert "hf_secret" not in repr(args) + str(args)
    assert "learning_rate" in repr(args)


@pytest.mark.parametrize(
    ("metric", "greater"),
    [
        ("nll", False),
        ("eval_heldout_nll", False),
        ("ece", False),
        ("accuracy", True),
        ("eval_loss", False),
        (None, None),
    ],
)
def test_the_best_model_has_the_lowest_nll(tmp_path: Path, metric: str | None, greater: bool | None) -> None:
    args = BayesianTrainingArguments(str(tmp_path), metric_for_best_model=metric, use_cpu=True)
    assert args.greater_is_better is greater
    given = BayesianTrainingArguments(str(tmp_path), metric_for_best_model="nll", greater_is_better=True, use_cpu=True)
    assert given.greater_is_better
