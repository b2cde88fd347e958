"""F10: a run of two processes. One of them kills itself in the middle of a step or of a save.

python -m tests.faults.ranks DIRECTORY [step|save STEP]    under RANK, WORLD_SIZE, ...: one of the processes
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from hf_bayes.training import checkpoints
from hf_bayes.training.checkpoints import newest_complete
from tests import runs

ROOT = Path(__file__).parents[2]
STEPS, HANG_SECONDS = 11, 120


class KillInStep(TrainerCallback):
    """Kill this process after the first micro-batch of a step, while the other process continues."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step + 1 == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def kill_in_save(step: int) -> None:
    """Kill this process before it writes its chains to the checkpoint of a step."""
    save = checkpoints.save

    def killed(checkpoint: Any, *args: Any, **kwargs: Any) -> None:
        if Path(checkpoint).name.endswith(f"checkpoint-{step}"):
            os.kill(os.getpid(), signal.SIGKILL)
        save(checkpoint, *args, **kwargs)

    checkpoints.save = killed


def main(directory: str, where: str = "", step: str = "0") -> None:
    dies = os.environ["RANK"] == "1"
    if dies and where == "save":
        kill_in_save(int(step))
    trainer = runs.trainer(
        directory,
        SGHMCConfig(num_chains=2, draws_per_chain=2),
        max_steps=STEPS,
        save_strategy="steps",
        save_steps=1,
        gradient_accumulation_steps=2,
        ddp_backend="gloo",
        callbacks=[KillInStep(int(step))] if dies and where == "step" else None,
    )
    trainer.train(resume_from_checkpoint=newest_complete(directory) is not None)
    trainer.save_model()


def launch(directory: Path, *arguments: str) -> tuple[list[int], list[str], float]:
    """Run both processes, without a launcher that would end one because of the other.

    Returns:
        Exit statuses and standard errors, and the seconds that the first outlived the second.
    Raises:
        TimeoutError: if it is still there after ``HANG_SECONDS``.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes, logs = [], []
    for rank in range(2):
        environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1, "HF_HUB_OFFLINE": 1}
        logs.append(directory.with_name(f"{directory.name}-{rank}.log"))
        with logs[-1].open("w") as log:
            command = [sys.executable, "-m", "tests.faults.ranks", str(directory), *arguments]
            environ = os.environ | {name: str(value) for name, value in environment.items()}
            processes.append(subprocess.Popen(command, cwd=ROOT, env=environ, stdout=log, stderr=log))
    try:
        second = processes[1].wait(HANG_SECONDS)
        died = time.monotonic()
        first = processes[0].wait(HANG_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise TimeoutError(f"still there after {HANG_SECONDS} s: {logs[0].read_text()[-2000:]}") from error
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [first, second], [log.read_text() for log in logs], time.monotonic() - died


if __name__ == "__main__":
    main(*sys.argv[1:])
