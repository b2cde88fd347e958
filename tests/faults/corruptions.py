"""F3: damage to a posterior on disk. Each fault changes a directory. A signed fault also corrects the manifest."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save

from hf_bayes.posteriors.sidecars import is_sidecar
from tests.faults.posteriors import draws

Fault = Callable[[Path, random.Random], None]
FAULTS: dict[str, Fault] = {}


def fault(function: Fault) -> Fault:
    FAULTS[function.__name__] = function
    return function


def tensor_files(directory: Path) -> list[Path]:
    return sorted(directory.rglob("*.safetensors"))


def listed(directory: Path) -> list[Path]:
    return [directory / name for name in json.loads((directory / "manifest.json").read_text())["files"]]


def sign(directory: Path) -> None:
    """Give the manifest the sizes and hashes of the present files, so that only their meaning is wrong."""
    path = directory / "manifest.json"
    manifest = json.loads(path.read_text())
    for name, entry in manifest["files"].items():
        if (directory / name).is_file():
            data = (directory / name).read_bytes()
            entry.update(size=len(data), sha256=hashlib.sha256(data).hexdigest())
    path.write_text(json.dumps(manifest))


def flip(path: Path, rng: random.Random, first: int, last: int) -> None:
    data = bytearray(path.read_bytes())
    data[rng.randrange(first, last)] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def header_end(path: Path) -> int:
    return 8 + struct.unpack("<Q", path.read_bytes()[:8])[0]


def edit_json(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def edit_tensors(path: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(path)
    change(tensors)
    path.write_bytes(save({name: tensor.contiguous() for name, tensor in tensors.items()}, metadata={"format": "pt"}))


def edit_header(path: Path, change: Callable[[str], str]) -> None:
    data, end = path.read_bytes(), header_end(path)
    header = change(data[8:end].decode()).encode()
    header += b" " * (-len(header) % 8)
    path.write_bytes(struct.pack("<Q", len(header)) + header + data[end:])


@fault
def truncated(directory: Path, rng: random.Random) -> None:
    path = rng.choice(listed(directory))
    path.write_bytes(path.read_bytes()[: rng.randrange(path.stat().st_size)])


@fault
def empty_file(directory: Path, rng: random.Random) -> None:
    rng.choice(listed(directory)).write_bytes(b"")


@fault
def longer(directory: Path, rng: random.Random) -> None:
    with rng.choice(listed(directory)).open("ab") as file:
        file.write(b"\0")


@fault
def header_bit_flip(directory: Path, rng: random.Random) -> None:
    path = rng.choice(tensor_files(directory))
    flip(path, rng, 0, header_end(path))


@fault
def data_bit_flip(directory: Path, rng: random.Random) -> None:
    path = rng.choice(tensor_files(directory))
    flip(path, rng, header_end(path), path.stat().st_size)


@fault
def zero_page(directory: Path, rng: random.Random) -> None:
    path = rng.choice(tensor_files(directory))
    data, end = bytearray(path.read_bytes()), header_end(path)
    start = rng.randrange(end, len(data) - 16)
    data[start : start + 16] = bytes(16)
    path.write_bytes(data)


@fault
def json_bit_flip(directory: Path, rng: random.Random) -> None:
    path = rng.choice([path for path in listed(directory) if path.suffix == ".json"])
    flip(path, rng, 0, path.stat().st_size)


@fault
def manifest_bit_flip(directory: Path, rng: random.Random) -> None:
    path = directory / "manifest.json"
    flip(path, rng, 0, path.stat().st_size)


@fault
def manifest_truncated(directory: Path, rng: random.Random) -> None:
    path = directory / "manifest.json"
    # A file without its final newline is still complete.
    path.write_bytes(path.read_bytes()[: rng.randrange(path.stat().st_size - 1)])


@fault
def manifest_missing(directory: Path, rng: random.Random) -> None:
    (directory / "manifest.json").unlink()


@fault
def manifest_of_another(directory: Path, rng: random.Random) -> None:
    other = directory.with_name("other")
    draws(3, adapter=True, seed=99).save_pretrained(other)
    shutil.copy(other / "manifest.json", directory)


@fault
def manifest_without_an_entry(directory: Path, rng: random.Random) -> None:
    # a sidecar without an entry is ignored, with a warning
    names = [path.relative_to(directory).as_posix() for path in listed(directory)]
    name = rng.choice([name for name in names if not is_sidecar(name)])
    edit_json(directory / "manifest.json", lambda manifest: manifest["files"].pop(name))


@fault
def manifest_with_an_unknown_key(directory: Path, rng: random.Random) -> None:
    edit_json(directory / "manifest.json", lambda manifest: manifest.update(more={}))


@fault
def members_swapped(directory: Path, rng: random.Random) -> None:
    one, other = rng.sample(sorted(directory.glob("members/*/*.safetensors")), 2)
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)


@fault
def member_of_another(directory: Path, rng: random.Random) -> None:
    other = directory.with_name("other")
    draws(3, adapter=True, seed=99).save_pretrained(other)
    name = "members/member_001/adapter_model.safetensors"
    shutil.copy(other / name, directory / name)


@fault
def member_copied_over_another(directory: Path, rng: random.Random) -> None:
    one, other = rng.sample(sorted(directory.glob("members/*/*.safetensors")), 2)
    shutil.copy(one, other)


@fault
def file_missing(directory: Path, rng: random.Random) -> None:
    rng.choice(listed(directory)).unlink()


@fault
def file_renamed(directory: Path, rng: random.Random) -> None:
    path = rng.choice(listed(directory))
    path.rename(path.with_name("renamed" + path.suffix))


@fault
def folder_missing(directory: Path, rng: random.Random) -> None:
    shutil.rmtree(rng.choice(sorted(directory.glob("members/*"))))


@fault
def extra_member(directory: Path, rng: random.Random) -> None:
    shutil.copytree(directory / "members/member_000", directory / "members/member_003")


@fault
def extra_tensors_at_the_top(directory: Path, rng: random.Random) -> None:
    shutil.copy(directory / "adapter_model.safetensors", directory / "model.safetensors")


@fault
def directory_for_a_file(directory: Path, rng: random.Random) -> None:
    path = rng.choice(listed(directory))
    path.unlink()
    path.mkdir()


@fault
def pipe_for_a_file(directory: Path, rng: random.Random) -> None:
    path = rng.choice([*listed(directory), directory / "manifest.json"])
    path.unlink()
    os.mkfifo(path)


@fault
def everything_missing(directory: Path, rng: random.Random) -> None:
    shutil.rmtree(directory)
    directory.mkdir()


# signed: the hashes fit, only the content of the files is wrong


def signed(function: Fault) -> Fault:
    def both(directory: Path, rng: random.Random) -> None:
        function(directory, rng)
        sign(directory)

    both.__name__ = f"signed_{function.__name__}"
    return fault(both)


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
    member_copied_over_another(directory, rng)


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


def edit_text(directory: Path, name: str, old: str, new: str) -> None:
    text = (directory / name).read_text()
    assert old in text
    (directory / name).write_text(text.replace(old, new, 1))


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
