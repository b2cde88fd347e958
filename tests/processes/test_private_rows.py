"""Processes that keep their rows: the posterior of all rows together, and what crosses between them."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from filelock import FileLock
from safetensors.torch import load_file
from torch import Tensor

from hf_bayes import SGHMCConfig
from tests import runs
from tests.processes import private_worker as worker

ROOT = Path(__file__).parents[2]


class Launch(NamedTuple):
    """The results that the processes wrote, in the order of their ranks."""

    tensors: list[dict[str, Tensor]]
    numbers: list[dict[str, Any]]


@pytest.fixture(scope="session", params=[2, pytest.param(4, marks=pytest.mark.slow)], ids="{} processes".format)
def launch(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Launch:
    return launched(request.param, tmp_path_factory)


@pytest.fixture(scope="session")
def two(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    return launched(2, tmp_path_factory)


def launched(processes: int, tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """One launch for each number of processes, shared by the workers of a parallel test run."""
    base = tmp_path_factory.getbasetemp()
    out = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / f"private_{processes}"
    with FileLock(f"{out}.lock"):
        if not out.exists():
            out.mkdir()
            environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]
            command += [str(processes), worker.__file__, str(out)]
            done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=580)
            assert done.returncode == 0, done.stderr[-4000:]
    return Launch(
        [load_file(out / f"rank_{rank}.safetensors") for rank in range(processes)],
        [json.loads((out / f"rank_{rank}.json").read_text()) for rank in range(processes)],
    )


def scores(draws: Tensor) -> tuple[float, float, float]:
    """Errors of mean and variance in standard errors, and the ratio of variances; chains are independent runs."""
    y = worker.outcomes().double()
    precision = len(y) + 1.0  # noise 1, prior 1
    z = (draws - y.sum() / precision) * math.sqrt(precision)
    found = []
    for values, expected in ((z.mean(1), 0.0), (z.square().mean(1), 1.0)):
        found.append(float((values.mean() - expected) / (values.std() / math.sqrt(len(values)))))
    return found[0], found[1], float(z.square().mean())


def test_private_rows_give_the_posterior_of_all_rows_together(launch: Launch) -> None:
    mean, variance, _ = scores(launch.tensors[0]["right/draws"])
    assert abs(mean) < 4  # standard errors
    assert abs(variance) < 4


def test_batches_weighed_alike_whatever_the_rows_are_caught(two: Launch) -> None:
    assert abs(scores(two.tensors[0]["alike/draws"])[0]) > 8


def test_a_variance_that_leaves_a_process_out_is_caught(two: Launch) -> None:
    assert scores(two.tensors[0]["certain/draws"])[1] > 4


def test_processes_hold_the_same_bits(launch: Launch) -> None:
    for name, value in launch.tensors[0].items():
        for other in launch.tensors[1:]:
            assert torch.equal(value, other[name]), name


def test_an_update_sends_a_fixed_number_of_bytes_for_any_rows(launch: Launch) -> None:
    for numbers in launch.numbers:
        few, many = (numbers[f"sent/{name}/6"] - numbers[f"sent/{name}/2"] for name in ("few", "many"))
        assert few == many == 4 * 8 * worker.CHAINS * (2 * worker.BATCHES + 1)  # four updates in float64
        # before the first: settings, sizes and counts, whose digits are more for more rows
        assert abs(numbers["sent/many/2"] - numbers["sent/few/2"]) < 64


def test_resume_is_bitwise_and_refuses_other_sizes(launch: Launch) -> None:
    sizes = worker.SIZES[len(launch.numbers)]
    for numbers in launch.numbers:
        assert numbers["resume/same"]
        assert f"private_rows: saved {list(sizes)}, now {list(sizes[::-1])}" in numbers["refused/sizes"]


def test_other_rows_of_one_process_are_refused_by_all(launch: Launch) -> None:
    for numbers in launch.numbers:
        assert "data.fingerprint: saved [" in numbers["refused/rows"]
        assert "private_rows" not in numbers["refused/rows"]


def test_the_probe_is_a_mean_of_each_process(launch: Launch) -> None:
    probes = launch.tensors[0]["whole/probes"]
    assert probes.shape == (4, 3, len(launch.numbers))  # looks, chains, processes
    assert (probes != 0).all()
    for numbers in launch.numbers:  # mean logits by class would show which classes a process has
        assert numbers["whole/logits"] == [0] * 4


def test_what_does_not_fit_is_refused_by_every_process(launch: Launch) -> None:
    last = len(launch.numbers) - 1
    for numbers in launch.numbers:
        assert "process 1 has learning_rate=0.2, process 0 0.1" in numbers["refused/settings"]
        assert "process 1 has rows of eval_dataset=4, process 0 3" in numbers["refused/evaluation"]
        assert (
            f"process {last} has {worker.BATCH - 1} rows of its own and cannot draw {worker.BATCH} "
            in numbers["refused/small"]
        )
        assert f"cannot draw {worker.BATCH * worker.BATCHES} different ones" in numbers["refused/disjoint"]


def test_other_methods_and_map_estimates_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="sghmc does not take private_rows"):
        runs.trainer(tmp_path, SGHMCConfig(), private_rows=True)
    with pytest.raises(ValueError, match="map_updates must be 0 with private_rows, got 3"):
        runs.arguments(tmp_path, private_rows=True, map_updates=3)
