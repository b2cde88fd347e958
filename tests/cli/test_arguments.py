from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest
from transformers import TrainingArguments

from hf_bayes.cli.arguments import MethodArguments, method_config, parse_arguments
from hf_bayes.methods.averaging.map import MAPConfig
from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig


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


def test_choices_hold_in_files_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.yaml").write_text("model: tiny\nmethod: bogus\n")
    with pytest.raises(SystemExit):
        parse_arguments(Model, arguments=[str(tmp_path / "run.yaml")])
    assert "invalid choice: 'bogus'" in capsys.readouterr().err


def test_files_without_a_mapping_and_stray_nulls_are_refused(tmp_path: Path) -> None:
    (tmp_path / "list.yaml").write_text("- model\n")
    (tmp_path / "null.yaml").write_text("model: tiny\nmethod: null\n")
    with pytest.raises(ValueError, match="must hold a mapping"):
        parse_arguments(Model, arguments=[str(tmp_path / "list.yaml")])
    with pytest.raises(ValueError, match="method cannot be null"):
        parse_arguments(Model, arguments=[str(tmp_path / "null.yaml")])


@pytest.mark.parametrize("fields", ['{"num_chains": 3, "prior_std": 0.5}', {"num_chains": 3, "prior_std": 0.5}])
def test_a_method_is_its_name_and_fields(fields: str | dict) -> None:
    assert method_config("sghmc", fields) == SGHMCConfig(num_chains=3, prior_std=0.5)
    assert method_config("sghmc") == SGHMCConfig()


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("sgmc", None, "unknown method 'sgmc'"),
        ("sghmc", "num_chains=3", "must be JSON"),
        ("sghmc", "[3]", "must be a mapping"),
        ("sghmc", '{"chains": 3}', "has no field 'chains'"),
        ("sghmc", '{"num_chains": 0}', "num_chains must be an integer >= 1"),
    ],
)
def test_a_method_that_does_not_exist_is_refused(name: str, fields: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        method_config(name, fields)


def test_without_a_method_the_trainer_chooses() -> None:
    assert MethodArguments().config() is None
    assert not MethodArguments().compares
    assert MethodArguments(method="auto", budget=100).compares
    assert isinstance(MethodArguments(method="map").config(), MAPConfig)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"method_args": {"num_chains": 2}}, "are fields of a method: name it with --method, or leave them out"),
        ({"method": "auto", "method_args": {"num_chains": 2}}, "are fields of a method: name it with --method"),
        ({"budget": 100}, "--budget=100 is for --method auto, got no --method"),
        ({"method": "map", "budget": 100}, "--budget=100 is for --method auto, got --method map"),
    ],
)
def test_settings_that_belong_to_no_method_are_refused(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MethodArguments(**fields).config()
