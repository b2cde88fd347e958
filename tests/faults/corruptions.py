"""F3: damage to a posterior on disk. Each fault changes a directory. A signed fault also corrects the manifest."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

from hf_bayes.posteriors.sidecars import is_sidecar
from tests.faults.edits import Fault, copy_member_over_another, edit_json, flip, header_end, listed, tensor_files
from tests.faults.posteriors import draws
from tests.faults.signed_corruptions import SIGNED

FAULTS: dict[str, Fault] = {}


def fault(function: Fault) -> Fault:
    FAULTS[function.__name__] = function
    return function


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
    copy_member_over_another(directory, rng)


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


FAULTS |= SIGNED
