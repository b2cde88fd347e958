from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

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
        (["--config", "a.yaml", "--config=b.yaml"], "--config is there twice: put all fields in one file"),
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


def parsed(tmp_path: Path, lines: str, name: str = "run.yaml") -> tuple[Model, TrainingArguments]:
    (tmp_path / name).write_text(lines if name.endswith(".json") else f"model: tiny\n{lines}\n")
    model, training = parse_arguments(Model, TrainingArguments, arguments=[f"--config={tmp_path / name}"])
    return model, training


@pytest.mark.parametrize("text", ["007", "1e5", "0.10", "on", "no", "1_0", "2020-01-01", "1:30", "0x10", "Null value"])
def test_a_text_of_a_file_stays_as_it_is_written(tmp_path: Path, text: str) -> None:
    assert parsed(tmp_path, f"run_name: {text}")[1].run_name == text
    assert parsed(tmp_path, f"targets: [{text}, 'null', a]")[0].targets == [text, "null", "a"]


@pytest.mark.parametrize(
    ("field", "text", "expected"),
    [
        ("eval_strategy", "no", "no"),
        ("save_strategy", "no", "no"),
        ("max_steps", "010", 10),
        ("learning_rate", "1e-3", 1e-3),
        ("bf16", "yes", True),
        ("bf16", "False", False),
        ("num_train_epochs", "2", 2.0),
    ],
)
def test_a_value_of_a_file_means_what_it_means_as_a_flag(tmp_path: Path, field: str, text: str, expected: Any) -> None:
    flags = ["--model", "tiny", f"--{field}", text]
    assert getattr(parsed(tmp_path, f"use_cpu: true\n{field}: {text}")[1], field) == expected
    assert getattr(parse_arguments(Model, TrainingArguments, arguments=[*flags, "--use_cpu"])[1], field) == expected


def test_values_within_a_mapping_have_types(tmp_path: Path) -> None:
    lines = "targets: &names [q, '1']\nseed: &seed 3"
    inner = "{a: 1e-3, b: 010, c: no, d: 2020-01-01, e: null, f: *names, g: *seed, h: [1.5, {i: -2}]}"
    model, training = parsed(tmp_path, f"{lines}\nmethod_args: {inner}")
    assert method_args(model) == {
        "a": 1e-3, "b": 10, "c": False, "d": "2020-01-01", "e": None, "f": ["q", "1"], "g": 3, "h": [1.5, {"i": -2}],
    }  # fmt: skip
    assert training.seed == 3


def test_fields_may_be_merged_from_another_mapping(tmp_path: Path) -> None:
    lines = "method_args: &shared {prior_std: 007}\n<<: {seed: 5, run_name: 007}\nrun_name: 1e5"
    model, training = parsed(tmp_path, lines)
    assert (method_args(model), training.seed, training.run_name) == ({"prior_std": 7}, 5, "1e5")


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("run.yaml", "seed: 1\nseed: 2", r"run.yaml cannot be read: 'seed' is there twice: leave one out .* line 3"),
        ("run.yaml", "method_args: {a: 1, a: 2}", "cannot be read: 'a' is there twice"),
        ("run.json", '{"model": "a", "model": "b"}', "run.json cannot be read: 'model' is there twice: leave one out"),
        ("run.yaml", "method_args: {a: !!timestamp 2020-01-01}", "method_args has a value that JSON does not have"),
        ("run.yaml", "targets: [a, null]", "targets has a list with null: leave it out"),
    ],
)
def test_what_a_file_does_not_say_clearly_is_refused(tmp_path: Path, name: str, text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parsed(tmp_path, text, name)
