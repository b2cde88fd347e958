"""Damage to the content of a posterior whose manifest is corrected: the hashes fit."""

from __future__ import annotations

import pickle
import random
import shutil
from pathlib import Path

import torch

from tests.faults.edits import Fault, copy_member_over_another, edit_header, edit_json, edit_tensors, edit_text, sign

SIGNED: dict[str, Fault] = {}


def signed(function: Fault) -> Fault:
    def both(directory: Path, rng: random.Random) -> None:
        function(directory, rng)
        sign(directory)

    both.__name__ = f"signed_{function.__name__}"
    SIGNED[both.__name__] = both
    return both


def member(directory: Path, rng: random.Random) -> Path:
    return rng.choice(sorted(directory.glob("members/*/*.safetensors")))


def set_value(directory: Path, rng: random.Random, value: float) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        flat = tensors[rng.choice(sorted(tensors))].view(-1)
        flat[rng.randrange(len(flat))] = value

    edit_tensors(member(directory, rng), change)


@signed
def nan(directory: Path, rng: random.Random) -> None:
    set_value(directory, rng, float("nan"))


@signed
def infinity(directory: Path, rng: random.Random) -> None:
    set_value(directory, rng, rng.choice([float("inf"), -float("inf")]))


@signed
def key_renamed(directory: Path, rng: random.Random) -> None:
    edit_tensors(member(directory, rng), lambda t: t.update({"renamed": t.pop(sorted(t)[0])}))


@signed
def key_extra(directory: Path, rng: random.Random) -> None:
    edit_tensors(member(directory, rng), lambda t: t.update(extra=torch.zeros(2)))


@signed
def key_missing(directory: Path, rng: random.Random) -> None:
    edit_tensors(member(directory, rng), lambda t: t.pop(sorted(t)[-1]))


@signed
def shape_transposed(directory: Path, rng: random.Random) -> None:
    edit_tensors(member(directory, rng), lambda t: t.update({k: v.T for k, v in t.items()}))


@signed
def dtype_halved(directory: Path, rng: random.Random) -> None:
    edit_tensors(member(directory, rng), lambda t: t.update({k: v.half() for k, v in t.items()}))


@signed
def dtype_doubled(directory: Path, rng: random.Random) -> None:
    edit_tensors(member(directory, rng), lambda t: t.update({k: v.double() for k, v in t.items()}))


@signed
def member_repeated(directory: Path, rng: random.Random) -> None:
    copy_member_over_another(directory, rng)


@signed
def root_of_another(directory: Path, rng: random.Random) -> None:
    shutil.copy(directory / "members/member_002/adapter_model.safetensors", directory)


@signed
def key_twice_in_header(directory: Path, rng: random.Random) -> None:
    edit_header(member(directory, rng), lambda text: text.rstrip()[:-1] + "," + text[text.index('"base_model') :])


@signed
def offsets_overlap(directory: Path, rng: random.Random) -> None:
    edit_header(member(directory, rng), lambda text: text.replace('"data_offsets":[48,', '"data_offsets":[44,'))


@signed
def config_key_unknown(directory: Path, rng: random.Random) -> None:
    edit_json(directory / "posterior_config.json", lambda c: c.update(extra=1))


@signed
def config_key_missing(directory: Path, rng: random.Random) -> None:
    edit_json(directory / "posterior_config.json", lambda c: c.pop(rng.choice(sorted(c))))


@signed
def config_wrong_count(directory: Path, rng: random.Random) -> None:
    edit_json(
        directory / "posterior_config.json", lambda c: c.update(num_members=rng.choice([0, 1, 2, 4, -1, 1000000]))
    )


@signed
def config_wrong_type(directory: Path, rng: random.Random) -> None:
    key = rng.choice(
        ["task", "method", "parameters", "prior", "base_model", "num_data", "seed", "diagnostics", "versions"]
    )
    edit_json(directory / "posterior_config.json", lambda c: c.update({key: [[]]}))


@signed
def config_other_version(directory: Path, rng: random.Random) -> None:
    edit_json(
        directory / "posterior_config.json", lambda c: c.update(format_version=rng.choice([0, 2, "1", None, True]))
    )


@signed
def config_other_shape(directory: Path, rng: random.Random) -> None:
    edit_json(directory / "posterior_config.json", lambda c: c["parameters"][0].__setitem__(1, [6, 2]))


@signed
def config_parameter_twice(directory: Path, rng: random.Random) -> None:
    edit_json(directory / "posterior_config.json", lambda c: c["parameters"].append(c["parameters"][0]))


@signed
def config_without_method_name(directory: Path, rng: random.Random) -> None:
    edit_json(directory / "posterior_config.json", lambda c: c["method"].pop("name"))


@signed
def json_key_twice(directory: Path, rng: random.Random) -> None:
    edit_text(directory, "posterior_config.json", '"seed": 0', '"seed": 0, "seed": 1')


@signed
def json_nan(directory: Path, rng: random.Random) -> None:
    edit_text(directory, "posterior_config.json", "1234.0", rng.choice(["NaN", "Infinity", "-Infinity", "1e999"]))


@signed
def json_is_a_list(directory: Path, rng: random.Random) -> None:
    (directory / "adapter_config.json").write_text("[1, 2]")


@signed
def json_too_deep(directory: Path, rng: random.Random) -> None:
    (directory / "posterior_config.json").write_text('{"a":' * 100_000)


@signed
def json_not_utf8(directory: Path, rng: random.Random) -> None:
    (directory / "posterior_config.json").write_bytes(b'{"task": "\xff"}')


@signed
def member_of_another_rank(directory: Path, rng: random.Random) -> None:
    edit_json(directory / "members/member_001/adapter_config.json", lambda c: c.update(r=4, lora_alpha=64))


@signed
def adapter_of_another_kind(directory: Path, rng: random.Random) -> None:
    for path in directory.rglob("adapter_config.json"):
        edit_json(path, lambda c: c.update(peft_type="IA3"))


@signed
def pickle_for_tensors(directory: Path, rng: random.Random) -> None:
    member(directory, rng).write_bytes(pickle.dumps({"weight": [1.0]}))
