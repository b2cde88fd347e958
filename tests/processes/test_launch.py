"""The launch lines of docs/multi_gpu.md, as a user types them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hf_bayes.posteriors.posterior import Posterior
from tests.tiny_models import TEXTS, tiny_llama, tiny_tokenizer

ROOT = Path(__file__).parents[2]


ACCELERATE = ["accelerate.commands.accelerate_cli", "launch"]


def launch(folder: Path, launcher: list[str], name: str, hosts: int = 1) -> Posterior:
    """Start the line once, or once for each host, HOST in it the host's number."""
    out = folder / name
    settings = {
        "model_name_or_path": folder / "llama",
        "dataset": folder / "book.txt",
        "window": 32,
        "output_dir": out,
        "method": "sghmc",
        "method_args": '{"num_chains": 4, "prior_std": 0.1}',
        "learning_rate": 1e-2,
        "max_steps": 6,
        "per_device_train_batch_size": 4,
        "use_cpu": "true",
        "disable_tqdm": "true",
        "report_to": "none",
    }
    flags = [str(part) for key, value in settings.items() for part in (f"--{key}", value)]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", *launcher, str(ROOT / "scripts/run_clm.py"), *flags]
    logs = [folder / f"{name}_{host}.log" for host in range(hosts)]
    processes = [
        subprocess.Popen(
            [str(host) if word == "HOST" else word for word in command],
            env=environment, cwd=folder, stdout=log.open("w"), stderr=subprocess.STDOUT,
        )
        for host, log in enumerate(logs)
    ]  # fmt: skip
    try:
        statuses = [process.wait(timeout=600) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert not any(statuses), [log.read_text()[-4000:] for log in logs]
    return Posterior.from_pretrained(out)


def free_port() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


@pytest.mark.slow
def test_every_launcher_gives_the_posterior_of_one_process(tmp_path):
    tiny_llama().save_pretrained(tmp_path / "llama")
    tiny_tokenizer().save_pretrained(tmp_path / "llama")
    (tmp_path / "book.txt").write_text("\n".join(TEXTS * 40))
    accelerate = [*ACCELERATE, "--main_process_port", "0"]
    alone = launch(tmp_path, accelerate, "alone")
    launchers = {
        "two": [*accelerate, "--multi_gpu", "--num_processes", "2"],
        "four": [*accelerate, "--multi_gpu", "--num_processes", "4"],
        **{
            f"torchrun{processes}": ["torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
            for processes in (1, 2, 4)
        },
    }
    two_hosts = [
        *[*ACCELERATE, "--multi_gpu", "--num_machines", "2", "--machine_rank", "HOST", "--num_processes", "4"],
        *["--main_process_ip", "127.0.0.1", "--main_process_port", free_port()],
    ]
    for name, launcher, hosts in [*((*item, 1) for item in launchers.items()), ("hosts", two_hosts, 2)]:
        found = launch(tmp_path, launcher, name, hosts)
        torch.testing.assert_close(found.sample(), alone.sample(), rtol=1e-4, atol=1e-5)  # six float32 updates
        for metric in ("nll", "map_nll", "epistemic"):
            assert found.config.metrics[metric] == pytest.approx(alone.config.metrics[metric], rel=1e-5)


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are listed in Linux's /proc")
def test_no_thread_of_gloo_is_left_to_abort_the_end_of_a_script(tmp_path):
    def left(ending: str) -> list[list[int]]:
        """Threads before and after the end, of each process."""
        command = [
            "torch.distributed.run",
            "--standalone",
            "--nproc_per_node",
            "2",
            "-m",
            "tests.processes.ending_worker",
        ]
        environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-m", *command, str(tmp_path / ending), ending],
            env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        files = sorted((tmp_path / ending).glob("threads_*.json"))
        assert len(files) == 2, done.stderr[-4000:]
        return [json.loads(file.read_text()) for file in files]

    assert all(before > 0 and after == 0 for before, after in left("end"))
    assert all(after > 0 for _, after in left("twin"))  # the trainer holds the groups, its callbacks the trainer
