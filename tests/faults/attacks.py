"""F8: directories that try to run code, or to read files outside, when they are loaded."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.faults import exhaustion
from tests.faults.edits import edit_json, listed, sign

Attack = Callable[[Path], None]
MARKER = "executed"
SECRET = "secret.safetensors"  # a valid adapter beside the directory: reading it would succeed


class Payload:
    """An object that runs a command when it is unpickled."""

    def __init__(self, directory: Path) -> None:
        self.command = f"touch {directory.parent / MARKER}"

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (self.command,)


def payload(directory: Path) -> bytes:
    return pickle.dumps(Payload(directory))


def code(directory: Path) -> bytes:
    return f"import os\nos.system('touch {directory.parent / MARKER}')\n".encode()


def attacks(example: Path) -> Iterator[tuple[str, Attack]]:
    """Return (name, attack) pairs. ``example`` is a directory of the kind under attack."""
    names = [path.relative_to(example).as_posix() for path in listed(example)]
    for name in [*names, "manifest.json", "README.md"]:
        yield f"pickle as {name}", lambda d, name=name: put(d, name, payload(d))
        if name in names:
            yield f"signed pickle as {name}", lambda d, name=name: (put(d, name, payload(d)), sign(d))
    for name in [
        "adapter_model.bin",
        "pytorch_model.bin",
        "training_args.bin",
        "optimizer.pt",
        "scheduler.pt",
        "scaler.pt",
        "rng_state.pth",
        "rng_state_0.pth",
        "custom_checkpoint_0.pkl",
        "state.pickle",
        "members/member_000/adapter_model.bin",
        "members/member_000/weights.pt",
    ]:
        yield f"pickle added as {name}", lambda d, name=name: put(d, name, payload(d))
    for name in ("modeling_posterior.py", "__init__.py", "hf_bayes.py", "conftest.py", "posterior_config.py"):
        yield f"code added as {name}", lambda d, name=name: put(d, name, code(d))
    for name in evil_names(example):
        yield f"manifest lists {name!r:.60}", lambda d, name=name: list_secret(d, name)
    for name in names:
        yield f"link out for {name}", lambda d, name=name: link_out(d, name)
    for name in ("members", "members/member_000", "members/member_001"):
        yield f"linked folder {name}", lambda d, name=name: link_folder(d, name)
    for target in ("/etc/passwd", "/dev/zero", "/proc/self/environ", "manifest.json"):
        yield f"manifest linked to {target}", lambda d, target=target: relink(d / "manifest.json", target)
    yield "endless device for tensors", lambda d: relink(d / "adapter_model.safetensors", "/dev/zero")
    for length in (0, 2**63, 2**64 - 1, 100_000_001, 10**9):
        yield (
            f"header of {length} bytes",
            lambda d, length=length: (
                put(d, "adapter_model.safetensors", struct.pack("<Q", length) + b"{}" * 64),
                sign(d),
            ),
        )
    for shape in ([2**62], [2**40, 2**40], [-1], [1.5], [[1]], "8"):
        yield f"tensor of shape {shape}", lambda d, shape=shape: (huge_tensor(d, shape), sign(d))
    yield "deep header", lambda d: (deep_header(d), sign(d))
    for key, value in (
        ("auto_map", {"AutoConfig": "modeling_posterior.Evil"}),
        ("custom_pipelines", {"evil": {"impl": "modeling_posterior.Evil"}}),
        ("auto_mapping", {"base_model_class": "Evil", "parent_library": "modeling_posterior"}),
    ):
        yield f"adapter names code in {key}", lambda d, key=key, value=value: (name_code(d, key, value), sign(d))
    yield "pending folder with code", plant_pending
    for name, attack in exhaustion.attacks():
        if name not in exhaustion.LARGE:  # tests/posteriors/test_exhaustion.py runs all of them, with measurements
            yield f"exhausting: {name}", attack


def leads_out(name: str) -> bool:
    """Return whether the attack of this name is a path out of the directory."""
    return name.startswith(("manifest lists", "link out", "linked folder", "manifest linked", "endless device"))


def put(directory: Path, name: str, data: bytes) -> None:
    (directory / name).parent.mkdir(parents=True, exist_ok=True)
    (directory / name).write_bytes(data)


def evil_names(example: Path) -> list[str]:
    return [
        f"../{SECRET}",
        f"../../{example.parent.name}/{SECRET}",
        f"members/../../{SECRET}",
        f"members/member_000/../../../{SECRET}",
        f"./../{SECRET}",
        f"..\\{SECRET}",
        str(example.parent / SECRET),
        f"//{SECRET}",
        f"~/{SECRET}",
        f"file://{SECRET}",
        f"members//../{SECRET}",
        f"$HOME/{SECRET}",
        f"../{SECRET}\0.safetensors",
        f"members/.../{SECRET}",
        f".{SECRET}",
        f"..%2f{SECRET}",
        "/etc/passwd",
        "/proc/self/environ",
        "",
        ".",
        "x" * 5000 + ".safetensors",
    ]


def list_secret(directory: Path, name: str) -> None:
    data = (directory.parent / SECRET).read_bytes()
    entry = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    edit_json(directory / "manifest.json", lambda manifest: manifest["files"].update({name: entry}))


def relink(path: Path, target: str | Path) -> None:
    path.unlink()
    path.symlink_to(target)


def link_out(directory: Path, name: str) -> None:
    """Replace a file by a link to the same file outside: only the path is wrong."""
    outside = directory.parent / f"outside-{name.replace('/', '-')}"
    shutil.move(directory / name, outside)
    (directory / name).symlink_to(outside)


def link_folder(directory: Path, name: str) -> None:
    outside = directory.parent / "outside-folder"
    shutil.move(directory / name, outside)
    (directory / name).symlink_to(outside, target_is_directory=True)


def huge_tensor(directory: Path, shape: object) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": shape, "data_offsets": [0, 2**62]}}).encode()
    put(directory, "adapter_model.safetensors", struct.pack("<Q", len(header)) + header)


def deep_header(directory: Path) -> None:
    header = b'{"a":' * 50_000 + b"1" + b"}" * 50_000
    put(directory, "adapter_model.safetensors", struct.pack("<Q", len(header)) + header)


def name_code(directory: Path, key: str, value: object) -> None:
    put(directory, "modeling_posterior.py", code(directory))
    for path in directory.rglob("adapter_config.json"):
        edit_json(path, lambda config: config.update({key: value}))


def plant_pending(directory: Path) -> None:
    digest = hashlib.sha256((directory / "manifest.json").read_bytes()).hexdigest()
    folder = directory / f"_hf_bayes_pending-{digest}"
    folder.mkdir()
    for path in listed(directory):
        put(folder, path.relative_to(directory).as_posix(), payload(directory))
    put(folder, "_hf_bayes_obsolete.json", b'{"files": ["../secret.safetensors"]}')
