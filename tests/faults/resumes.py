"""F4: runs killed at random times. Each resumes in a new process and must end like an uninterrupted run.

The times count the processor: by the clock, all kills would come before the first update on a busy machine.

python -m tests.faults.resumes DIRECTORY KILLS SEED    -> one line of JSON
"""

from __future__ import annotations

import collections
import importlib
import json
import os
import random
import resource
import shutil
import signal
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from hf_bayes.training.checkpoints import newest_complete
from tests.faults.kills import fork
from tests.training.checkpointed import STEPS, trainer
from tests.training.test_checkpoints import RUNS, everything


def train(directory: Path, result: Path | None = None) -> None:
    """Train to the end, from the newest complete checkpoint if there is one."""
    method, changes = RUNS["sghmc"]
    run = trainer(directory, method, save_strategy="steps", save_steps=1, **changes)
    run.train(resume_from_checkpoint=newest_complete(directory))
    if result is not None:
        save_file({name: value.contiguous() for name, value in everything(run).items()}, result)


def train_until(seconds: float, directory: Path) -> None:
    """Train until the kernel ends the process, after so much time of the processor. Python cannot prevent it."""
    signal.setitimer(signal.ITIMER_PROF, seconds)  # SIGPROF has no handler
    train(directory)


def main(base: str, kills: str, seed: str) -> None:
    torch.set_num_threads(1)  # no training in this process: forks of a process with worker threads may hang
    silence = os.dup(1)
    os.dup2(2, 1)  # the logs of Trainer are not the result
    for name in (
        "arviz",
        "scipy.stats",
    ):  # imported by a run at its end, for so long that kills would miss the run
        importlib.import_module(name)
    rng, root = random.Random(int(seed)), Path(base)
    os.waitpid(fork(lambda: train(root / "whole", root / "whole.safetensors")), 0)
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)  # of the only child so far
    whole, seconds = load_file(root / "whole.safetensors"), spent.ru_utime + spent.ru_stime
    tally: collections.Counter[str] = collections.Counter()
    for kill in range(int(kills)):
        directory, result = root / f"run-{kill}", root / f"run-{kill}.safetensors"
        limit, last = rng.uniform(0.4, 1.0) * seconds, directory / f"checkpoint-{STEPS}"
        while True:
            shutil.rmtree(directory, ignore_errors=True)
            status = os.waitpid(fork(lambda directory=directory, limit=limit: train_until(limit, directory)), 0)[1]
            if os.WIFSIGNALED(status) and not last.exists():
                break
            limit *= 0.9  # the first run took longer than others: this one had no update left
        begun = newest_complete(directory) is not None
        os.waitpid(fork(lambda directory=directory, result=result: train(directory, result)), 0)
        same = result.exists() and all(torch.equal(value, whole[name]) for name, value in load_file(result).items())
        tally[("same" if begun else "same, from the start") if same else "different"] += 1
    os.write(silence, (json.dumps(tally) + "\n").encode())


if __name__ == "__main__":
    main(*sys.argv[1:])
