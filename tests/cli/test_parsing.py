from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest
from transformers import TrainingArguments

from hf_bayes.cli.parsing import parse_arguments


@dataclass
class Model:
    model: str
    method: Literal["sghmc", "map"] = "sghmc"
    method_args: dict | str | None = None
    targets: list[str] | None = field(default=None)


VALUES = {
    "model": "tiny",
    "method": "map",
    "targets": ["q_proj", "v_proj"],
    "method_args": {"prior_std": 0.5, "temper": "posterior"},
    "output_dir": "out",
    "learning_rate": 1e-4,
    "num_train_epochs": 2,
    "bf16": False,
    "lr_scheduler_kwargs": {"num_cycles": 3},
}

YAML = """
model: tiny
method: map
targets: [q_proj, v_proj]
method_args: {prior_std: 5e-1, temper: posterior}
output_dir: out
learning_rate: 1e-4
num_train_epochs: 2
bf16: false
lr_scheduler_kwargs:
  num_cycles: 3
"""

FLAGS = [
    *["--model", "tiny", "--method", "map", "--targets", "q_proj", "v_proj", "--output_dir", "out"],
    *["--method_args", '{"prior_std": 0.5, "temper": "posterior"}', "--learning_rate", "1e-4"],
    *["--num_train_epochs", "2", "--bf16", "false", "--lr_scheduler_kwargs", '{"num_cycles": 3}'],
]


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "run.yaml").write_text(YAML)
    (tmp_path / "run.json").write_text(json.dumps(VALUES))
    return {"yaml": str(tmp_path / "run.yaml"), "json": str(tmp_path / "run.json")}


def method_args(model: Model) -> dict:
    return json.loads(model.method_args) if isinstance(model.method_args, str) else model.method_args or {}


def test_yaml_json_and_command_line_say_the_same(files: dict[str, str]) -> None:
    parsed = [parse_arguments(Model, TrainingArguments, arguments=a) for a in ([files["yaml"]], [files["json"]], FLAGS)]
    for model, training in parsed:
        assert (model.model, model.method, model.targets) == ("tiny", "map", ["q_proj", "v_proj"])
        assert method_args(model) == VALUES["method_args"]
        assert training.learning_rate == 1e-4
        assert training.num_train_epochs == 2
        assert training.lr_scheduler_kwargs == {"num_cycles": 3}


def test_flags_win_over_the_file(files: dict[str, str]) -> None:
    file, flags = ["--config", files["yaml"]], ["--method", "sghmc", "--learning_rate", "0.5"]
    for given in file + flags, flags + file, file[1:] + flags:
        model, training = parse_arguments(Model, TrainingArguments, arguments=given)
        assert (model.method, training.learning_rate) == ("sghmc", 0.5)
        assert model.targets == ["q_proj", "v_proj"]


def test_unknown_fields_of_a_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("model: tiny\nlearning_rat: 1.0\n")
    with pytest.raises(ValueError, match="does not have: learning_rat"):
        parse_arguments(Model, arguments=[str(tmp_path / "run.yaml")])


def test_choices_hold_in_files_too(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("model: tiny\nmethod: bogus\n")
    with pytest.raises(ValueError, match="invalid choice: 'bogus'"):
        parse_arguments(Model, arguments=[str(tmp_path / "run.yaml")])


def test_the_first_word_is_the_field_that_a_command_names(files: dict[str, str]) -> None:
    (model,) = parse_arguments(Model, arguments=["tiny", "--method", "map"], first="model")
    assert (model.model, model.method) == ("tiny", "map")
    (model, _) = parse_arguments(Model, TrainingArguments, arguments=[files["yaml"]], first="model")
    assert model.targets == ["q_proj", "v_proj"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "tiny", "--methd", "map"], "'--methd' is no argument of this command: did you mean --method?"),
        (["--model", "tiny", "--zzz"], "'--zzz' is no argument of this command: see --help"),
        ([], "the following arguments are required: --model"),
        (["--config"], "--config needs a file"),
    ],
)
def test_wrong_arguments_are_named(arguments: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_arguments(Model, arguments=arguments)


@pytest.mark.parametrize(("name", "text"), [("run.yaml", "model: [tiny"), ("run.json", "{model: tiny}")])
def test_a_file_that_cannot_be_parsed_is_named(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=f"{name} cannot be read: ") as caught:
        parse_arguments(Model, arguments=[str(tmp_path / name)])
    assert "\n" not in str(caught.value)


def test_files_without_a_mapping_and_stray_nulls_are_refused(tmp_path: Path) -> None:
    (tmp_path / "list.yaml").write_text("- model\n")
    (tmp_path / "null.yaml").write_text("model: tiny\nmethod: null\n")
    with pytest.raises(ValueError, match="must hold a mapping"):
        parse_arguments(Model, arguments=[str(tmp_path / "list.yaml")])
    with pytest.raises(ValueError, match="method cannot be null"):
        parse_arguments(Model, arguments=[str(tmp_path / "null.yaml")])
