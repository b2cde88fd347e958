"""F1: writers killed at random times and before each of their system calls. Each writer is a fork of one process.

python -m tests.faults.kills DIRECTORY NUM_RANDOM SEED    -> one line of JSON
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hf_bayes.posteriors.posterior import Posterior
from tests.faults.posteriors import draws, equal

# The system calls that change a directory. Between two of them a kill finds the same state.
CALLS = ("write", "mkdir", "rename", "replace", "unlink", "rmdir")
USER_FILES = {"checkpoint-5/optimizer.pt": b"state", "runs/events": b"log", "notes.txt": b"mine"}


def atomic_save(posterior: Posterior, directory: Path) -> None:
    posterior.save_pretrained(directory)


def in_place_save(posterior: Posterior, directory: Path) -> None:
    """Write each file atomically and the manifest last, but not the set in one step: the broken twin."""
    fresh = directory.with_name("fresh")
    shutil.rmtree(fresh, ignore_errors=True)
    posterior.save_pretrained(fresh)
    shutil.rmtree(directory / "members", ignore_errors=True)
    for source in sorted(fresh.rglob("*"), key=lambda path: path.name == "manifest.json"):
        if source.is_file():
            target = directory / source.relative_to(fresh)
            target.parent.mkdir(parents=True, exist_ok=True)
            data = source.read_bytes()
            handle = os.open(target.with_suffix(".tmp"), os.O_WRONLY | os.O_CREAT)
            os.write(handle, data)
            os.close(handle)
            os.replace(target.with_suffix(".tmp"), target)


def fork(work: Callable[[], None]) -> int:
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(0)
    return child


def kill_before_call(number: int) -> None:
    """Kill this process before its ``number``-th changing system call. A write first writes half of its bytes."""
    left = number

    def wrap(name: str) -> None:
        original = getattr(os, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                if name == "write":
                    original(args[0], bytes(args[1])[: len(args[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        setattr(os, name, call)

    for name in CALLS:
        wrap(name)


def found(directory: Path, candidates: dict[str, Posterior]) -> str:
    try:
        posterior = Posterior.from_pretrained(directory)
    except (ValueError, OSError) as error:
        return f"unreadable: {error}"
    return next((name for name, candidate in candidates.items() if equal(posterior, candidate)), "mixed")


def leftovers(directory: Path) -> list[str]:
    listed = set(json.loads((directory / "manifest.json").read_text())["files"]) | {"README.md", "manifest.json"}
    present = {path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()}
    empty = {
        path.relative_to(directory).as_posix()
        for path in directory.rglob("*")
        if path.is_dir() and not any(path.iterdir())
    }
    return sorted((present | empty) - listed - set(USER_FILES))


def user_files_intact(directory: Path) -> bool:
    return all((directory / name).read_bytes() == data for name, data in USER_FILES.items())


def prepare(directory: Path, posterior: Posterior) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    posterior.save_pretrained(directory)
    for name, data in USER_FILES.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_bytes(data)


def kill_at_every_call(directory: Path, old: Posterior, new: Posterior, save: Any = atomic_save) -> list[str]:
    """Return the result of a reader after a kill before call 0, 1, 2, ... until the save succeeds."""
    outcomes = []
    while True:
        prepare(directory, old)
        number = len(outcomes)

        def work(number: int = number) -> None:
            kill_before_call(number)
            save(new, directory)

        _, status = os.waitpid(fork(work), 0)
        outcome = found(directory, {"old": old, "new": new})
        if save is atomic_save:
            old.save_pretrained(directory)
            if leftovers(directory) or not user_files_intact(directory) or found(directory, {"old": old}) != "old":
                outcome = f"next save left {leftovers(directory)}"
        outcomes.append(outcome)
        if not os.WIFSIGNALED(status):
            return outcomes


def kill_at_random(
    directory: Path, one: Posterior, other: Posterior, *, kills: int, rng: random.Random
) -> dict[str, int]:
    """Kill a writer at random times while it saves two posteriors in turn. Return the results of readers."""
    prepare(directory, one)
    tally: dict[str, int] = {}

    def work() -> None:
        while True:
            for posterior in (other, one):
                posterior.save_pretrained(directory)

    for _ in range(kills):
        child = fork(work)
        time.sleep(rng.uniform(0.0, 0.15))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        outcome = found(directory, {"one": one, "other": other})
        one.save_pretrained(directory)
        if leftovers(directory) or not user_files_intact(directory):
            outcome = f"next save left {leftovers(directory)}"
        tally[outcome] = tally.get(outcome, 0) + 1
    return tally


def read_while_writing(directory: Path, one: Posterior, other: Posterior, *, reads: int) -> dict[str, int]:
    prepare(directory, one)

    def work() -> None:
        while True:
            for posterior in (other, one):
                posterior.save_pretrained(directory)

    child = fork(work)
    tally: dict[str, int] = {}
    try:
        for _ in range(reads):
            outcome = found(directory, {"one": one, "other": other})
            tally[outcome] = tally.get(outcome, 0) + 1
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return tally


def main(base: str, kills: str, seed: str) -> None:
    os.fsync = lambda file: None  # fsync protects against power cuts, not kills, and is slow on a busy disk
    torch.set_num_threads(1)  # forks of a process with worker threads may hang
    directory = Path(base) / "posterior"
    small, large = draws(1, seed=1), draws(3, seed=2)
    started = time.monotonic()
    result = {
        "grow": kill_at_every_call(directory, small, large),
        "shrink": kill_at_every_call(directory, large, small),
        "twin": kill_at_every_call(directory, large, small, in_place_save),
        "random": kill_at_random(directory, small, large, kills=int(kills), rng=random.Random(int(seed))),
        "reads": read_while_writing(directory, small, large, reads=60),
        "seconds": time.monotonic() - started,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
