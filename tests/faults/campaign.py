"""Run faults and attacks, each on a fork of one process that has imported everything.

python -m tests.faults.campaign DIRECTORY NUM_FAULTS SEED    -> one line of JSON
"""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from hf_bayes.distributions.approximations import Draws
from hf_bayes.posteriors.config import PosteriorConfig
from hf_bayes.posteriors.lora_keys import adapter_key
from hf_bayes.posteriors.posterior import Posterior
from hf_bayes.posteriors.sidecars import Sidecars
from tests.faults.attacks import MARKER, SECRET, attacks, leads_out
from tests.faults.corruptions import FAULTS
from tests.faults.posteriors import draws, equal

HANG_SECONDS = 60
SIDECARS = Sidecars(
    {
        "tokenizer.json": json.dumps({"model": {"vocab": {f"word{i}": i for i in range(99)}}}).encode(),
        "tokenizer_config.json": b'{"model_max_length": 64, "padding_side": "left"}',
        "chat_template.jinja": b"{% for message in messages %}{{ message['content'] }}{% endfor %}",
        "preprocessor_config.json": b'{"image_mean": [0.5, 0.5, 0.5]}',
    }
)
REFUSED, SAME, DIFFERENT, CRASH, HANG, OUTSIDE, EXECUTED, VAGUE = [
    "refused",
    "accepted_same",
    "accepted_different",
    "crash",
    "hang",
    "read_outside",
    "executed",
    "vague_error",
]


def naive_load(directory: Path) -> Posterior:
    """Load without any check: the broken twin."""
    config = json.loads((directory / "posterior_config.json").read_text())
    config.pop("format_version", None)
    fields = {key: value for key, value in config.items() if key in PosteriorConfig.__dataclass_fields__}
    rows = []
    for folder in sorted(directory.glob("members/*")):
        tensors = load_file(folder / "adapter_model.safetensors")
        rows.append(torch.cat([tensors[adapter_key(name)].float().flatten() for name, _ in config["parameters"]]))
    posterior = object.__new__(Posterior)  # without the checks of the object, too
    object.__setattr__(posterior, "approximation", Draws(torch.stack(rows), torch.arange(len(rows))))
    object.__setattr__(
        posterior, "config", PosteriorConfig(**{**fields, "num_members": len(rows), "member_chains": []})
    )
    object.__setattr__(posterior, "adapter_config", json.loads((directory / "adapter_config.json").read_text()))
    return posterior


def outcome(load: Callable[[Path], Any], directory: Path, same: Callable[[Any], bool]) -> str:
    """Return the outcome of loading the directory in a watched fork: no open outside, nothing unpickled or run."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        result = CRASH
        seen: list[str] = []
        try:
            watch(directory, seen)
            result = classify(load, directory, same)
        finally:
            os.write(write, (seen[0] if seen else result).encode())
            os._exit(0)
    os.close(write)
    deadline = time.monotonic() + HANG_SECONDS
    while os.waitpid(child, os.WNOHANG)[0] == 0:
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            os.close(read)
            return HANG
        time.sleep(0.001)
    result = os.read(read, 4096).decode() or CRASH
    os.close(read)
    return EXECUTED if (directory.parent / MARKER).exists() else result


def classify(load: Callable[[Path], Any], directory: Path, same: Callable[[Any], bool]) -> str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loaded = load(directory)
    except (ValueError, OSError) as error:
        return REFUSED if str(directory) in str(error) else f"{VAGUE}: {error}"
    except BaseException as error:
        return f"{CRASH}: {type(error).__name__}: {error}"
    return SAME if same(loaded) else DIFFERENT


def watch(directory: Path, seen: list[str]) -> None:
    dangerous = (
        "pickle.find_class",
        "os.system",
        "os.exec",
        "os.posix_spawn",
        "subprocess.Popen",
        "ctypes.dlopen",
        "exec",
    )

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event.startswith(dangerous):
            seen.append(f"{EXECUTED}: {event}")
        if event in ("open", "os.listdir", "os.scandir") and isinstance(arguments[0], (str, bytes, os.PathLike)):
            path = os.path.realpath(os.fsdecode(arguments[0]))
            if not path.startswith((str(directory), sys.prefix, sys.base_prefix)):
                seen.append(f"{OUTSIDE}: {path}")

    sys.addaudithook(hook)


def fresh(base: Path, clean: Path, name: str) -> Path:
    """Return a copy of the clean posterior in a new folder, with a secret beside it."""
    place = base / name
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    shutil.copytree(clean, place / "posterior")
    shutil.copy(clean / "adapter_model.safetensors", place / SECRET)
    return place / "posterior"


def run_faults(base: Path, clean: Path, original: Posterior, count: int, seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    tally: Counter[str] = Counter()
    naive: Counter[str] = Counter()
    wrong: list[str] = []
    theta = original.approximation.theta
    # Kinds come in turn, so that none is left out. The target is random.
    for name, function in itertools.islice(itertools.cycle(FAULTS.items()), count):
        directory = fresh(base, clean, "fault")
        function(directory, rng)
        result = outcome(Posterior.from_pretrained, directory, lambda loaded: equal(loaded, original))
        tally[result.split(":")[0]] += 1
        if result not in (REFUSED, SAME):
            wrong.append(f"{name}: {result}")
        if "pipe" not in name:  # the twin would hang on it
            twin = outcome(naive_load, directory, lambda loaded: torch.equal(loaded.approximation.theta, theta))
            naive[twin.split(":")[0]] += 1
    return {"tally": tally, "wrong": wrong, "naive": naive, "kinds": len(FAULTS)}


def run_attacks(base: Path, clean: Path, original: Posterior) -> dict[str, Any]:
    tally: Counter[str] = Counter()
    wrong: list[str] = []
    loaders: tuple[tuple[Callable[[Path], Any], Callable[[Any], bool]], ...] = (
        (Posterior.from_pretrained, lambda loaded: equal(loaded, original)),
        (
            lambda directory: Posterior.from_adapters([directory]),
            lambda loaded: torch.equal(loaded.approximation.mean.sort()[0], original.representative.sort()[0]),
        ),
    )
    for name, function in attacks(clean):
        for load, same in loaders:
            directory = fresh(base, clean, "attack")
            function(directory)
            result = outcome(load, directory, same)
            tally[result.split(":")[0]] += 1
            harmless = "names code" in name  # another adapter_config.json with plain data only, or without the code
            if result not in (REFUSED, SAME) and not (harmless and result == DIFFERENT):
                wrong.append(f"{name}: {result}")
    names = [name for name, _ in attacks(clean)]
    return {"tally": tally, "wrong": wrong, "variants": len(names), "ways_out": sum(map(leads_out, names))}


def main(base: str, count: str, seed: str) -> None:
    os.fsync = lambda file: None  # fsync protects against power cuts only
    torch.set_num_threads(1)  # forks of a process with worker threads may hang
    root = Path(os.path.realpath(base))
    original = replace(draws(3, adapter=True, seed=0), sidecars=SIDECARS)
    original.save_pretrained(root / "clean")
    assert equal(Posterior.from_pretrained(root / "clean"), original)
    # Files that are read once per process (versions of libraries) are read before the forks are watched.
    naive_load(root / "clean")
    Posterior.from_adapters([root / "clean"])
    started = time.monotonic()
    result = {
        "faults": run_faults(root, root / "clean", original, int(count), int(seed)),
        "attacks": run_attacks(root, root / "clean", original),
        "seconds": time.monotonic() - started,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
