"""Four chains as 1 x 4, 2 x 2 and 4 x 1 (processes x chains), two chains on four processes: the same runs."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from filelock import FileLock
from safetensors.torch import load_file
from torch import Tensor

from hf_bayes.posteriors.posterior import Posterior
from hf_bayes.posteriors.storage import MANIFEST
from tests.tiny_models import VOCABULARY

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(900)  # the first test waits for three launches, of four processes at most

LAYOUTS = (4, 2, 1)
"""Processes of each launch; later ones go on with a checkpoint of the first."""


class Launch(NamedTuple):
    """The results that the processes of a launch wrote, in the order of their ranks."""

    out: Path
    tensors: list[dict[str, Tensor]]
    numbers: list[dict[str, Any]]

    def find(self, prefix: str) -> dict[str, list[Tensor]]:
        """name -> the values of all processes that have it."""
        names = {name for tensors in self.tensors for name in tensors if name.startswith(prefix)}
        return {name: [tensors[name] for tensors in self.tensors if name in tensors] for name in sorted(names)}


def launch(out: Path, processes: int, earlier: Path | None) -> None:
    out.mkdir(parents=True)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    command += [str(Path(__file__).with_name("worker.py")), str(out), str(earlier or "none")]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=560)
    assert done.returncode == 0, done.stderr[-4000:]


def read(out: Path, processes: int) -> Launch:
    """Return the results of a launch."""
    ranks = range(processes)
    tensors = [load_file(out / f"rank_{rank}.safetensors") for rank in ranks]
    return Launch(out, tensors, [json.loads((out / f"rank_{rank}.json").read_text()) for rank in ranks])


@pytest.fixture(scope="session")
def launches(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Launch]:
    """One launch for each layout, shared by the workers of a parallel test run."""
    base = tmp_path_factory.getbasetemp()
    root = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "launches"
    with FileLock(f"{root}.lock"):
        earlier = None
        for processes in LAYOUTS:
            if not (root / "done").exists():
                launch(root / str(processes), processes, earlier)
            earlier = root / str(LAYOUTS[0])
        (root / "done").touch()
    return {processes: read(root / str(processes), processes) for processes in LAYOUTS}


def assert_close(found: Any, expected: Any, tolerance: float, path: str = "") -> None:
    """Numbers within a relative tolerance, all else equal, through dictionaries and lists."""
    if isinstance(expected, dict):
        clocks = ("runtime", "per_second", "preparation_time")
        keys = [key for key in expected if not key.endswith(clocks)]
        assert [key for key in found if not key.endswith(clocks)] == keys, path
        for key in keys:
            assert_close(found[key], expected[key], tolerance, f"{path}/{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), path
        for index, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_close(one, other, tolerance, f"{path}/{index}")
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=tolerance, abs=tolerance), path
    else:
        assert found == expected, path


@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize(
    ("run", "tolerance"),
    [
        ("train", 1e-9),  # twenty float64 updates
        ("data", 1e-9),  # the same, on four processes with two for each chain
        ("hmc", 1e-9),
        ("penalty", 1e-9),
        ("stream", 1e-9),
        ("gaussian", 1e-6),  # Adam divides by the root of a moment that is near 0 at first
        ("moved4", 1e-9),  # begun by four processes, gone on with by two, by one
        ("moved2", 1e-9),  # the same, two of the four to a chain
    ],
)
def test_chains_are_the_same_on_every_layout(launches, processes, run, tolerance):
    found, expected = launches[processes].find(f"{run}/"), launches[1].find(f"{run}/")
    assert found.keys() == expected.keys()
    for name, values in found.items():
        torch.testing.assert_close(values[0], expected[name][0], rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("run", ["own4", "own2", "own_moved4", "own_moved2"])
def test_chains_without_a_learning_rate_are_the_same(launches, processes, run):
    """The second two are begun by four processes, after the curvature pass, and resumed by two and by one."""
    found, expected = launches[processes].find(f"{run}/"), launches[1].find(f"{run}/")
    assert found.keys() == expected.keys()
    for name, values in found.items():
        if "/root/" not in name:  # eigenvectors have arbitrary signs
            # 17 updates of the sampler amplify rounding; measured 1e-12
            torch.testing.assert_close(values[0], expected[name][0], rtol=1e-9, atol=1e-9, msg=name)
    for numbers in launches[processes].numbers:
        trial = f"trial{run[-1]}"
        assert numbers[trial] == pytest.approx(launches[1].numbers[0][trial], rel=1e-12)


@pytest.mark.parametrize("chains", [4, 2])
@pytest.mark.parametrize("processes", [2, 4])
def test_first_gradient_in_float32_is_the_same_on_every_layout(launches, processes, chains):
    found, expected = (launches[n].find(f"gradient{chains}/") for n in (processes, 1))
    assert len(found) == chains
    for name, values in found.items():
        assert len(values) == max(1, processes // chains)
        for value in values:
            assert (value - expected[name][0]).norm() < 1e-6 * expected[name][0].norm()


@pytest.mark.parametrize("run", ["data", "moved2", "own2", "own_moved2", "hmc", "penalty", "stream"])
def test_processes_that_share_a_chain_hold_the_same_bits_of_it(launches, run):
    found = launches[4].find(f"{run}/theta/")
    assert len(found) == 2
    for one, other in found.values():
        assert torch.equal(one, other)


def test_different_rows_on_processes_that_share_a_chain_matter(launches):
    """The twin: without the sum over data a process would follow its own half of the minibatch."""
    whole, shared = (launches[n].find("data/theta/") for n in (1, 4))
    alone = launches[1].find("train/theta/")  # the same start and seed, half the rows per update
    for chain in (0, 1):
        name = f"data/theta/{chain}"
        off = (alone[f"train/theta/{chain}"][0] - whole[name][0]).norm()
        assert off > 1e6 * (shared[name][0] - whole[name][0]).norm()


@pytest.mark.parametrize("processes", [2, 4])
def test_a_laplace_pass_on_shared_rows_equals_one_process(launches, processes):
    found, expected = launches[processes].find("look/"), launches[1].find("look/")
    # seven combinations with gradients and sums, a classifier's full GGN and Hessian, five structures of rows with
    # weights, what fit_laplace makes and says
    assert len(found) == 38
    for name, values in found.items():
        assert len(values) == processes
        for value in values:
            # the search for log t ends within 1e-8 (scipy's xatol)
            tolerance = 1e-7 if name == "look/fit/calibration" else 1e-9
            torch.testing.assert_close(value, expected[name][0], rtol=tolerance, atol=tolerance, msg=name)
    for name, values in launches[processes].find("deaf/").items():  # the twin: without sums it sees its own rows
        whole = expected[name.replace("deaf", "look")][0]
        assert min(float((value - whole).norm() / whole.norm()) for value in values) > 0.1, name


@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize(
    "name", ["heldout2", "heldout1", "noise2", "noise1", "learnt2", "learnt1", "run_learnt2", "run_learnt1"]
)
def test_held_out_prior_and_learnt_noise_equal_one_process(launches, processes, name):
    expected = launches[1].numbers[0][name]
    for numbers in launches[processes].numbers:
        # weights agree to 1e-6 after Adam, as above; where the search ends is as smooth in them
        assert_close(numbers[name], expected, 1e-5, name)


@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize(("method", "members"), [("four", 4), ("two", 2), ("gaussian", 10)])
def test_the_mixtures_temperature_equals_one_processs(launches, processes, method, members):
    name = f"calibrated_{method}"
    expected = launches[1].numbers[0][name]
    assert expected["temperature"] != 1  # it was fitted
    assert (expected["num_members"], expected["num_terms"]) == (members, 45 * 7)
    for numbers in launches[processes].numbers:
        assert_close(numbers[name], expected, 1e-6, name)  # AdamW, as above
        assert numbers[f"{name}/shown"] == numbers[name]["temperature"]


@pytest.mark.parametrize("processes", [2, 4])
def test_partial_held_out_rows_would_give_another_prior(launches, processes):
    """The twins: processes without sums over the rows of all, and chains that are not gathered."""
    (expected,) = launches[1].numbers[0]["heldout1"]
    for numbers in launches[processes].numbers:
        (note,) = numbers["deaf_heldout1"]
        assert abs(math.log(note["prior_precision"] / expected["prior_precision"])) > 1e-2
    alone, both = (launches[1].numbers[0][f"noise{chains}"] for chains in (1, 2))
    assert abs(math.log(alone / both)) > 1e-3


@pytest.mark.parametrize("chains", [4, 2])
@pytest.mark.parametrize("processes", LAYOUTS)
def test_resume_is_bitwise_on_the_same_layout(launches, processes, chains):
    for numbers in launches[processes].numbers:
        assert numbers[f"resume{chains}/same"]
        assert numbers[f"resume{chains}/newest"] == 8


@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("name", ["train/logs", "train/metrics", "train/diagnostics", "before/metrics",
                                  "predict/metrics", "data/logs", "data/metrics", "gaussian/metrics",
                                  "laplace/diagnostics"])  # fmt: skip
def test_what_is_reported_does_not_depend_on_the_layout(launches, processes, name):
    # probabilities are summed where one process refines small uncertainties: good to 1e-6 in float32
    expected = launches[1].numbers[0][name]
    for numbers in launches[processes].numbers:
        assert_close(numbers[name], expected, 1e-6, name)


def test_the_compared_logs_contain_noise_and_convergence(launches):
    last = [entry for entry in launches[1].numbers[0]["train/logs"] if "loss" in entry][-1]
    assert {"probe_rhat", "probe_ess", "noise_ratio/chain_3", "distance_in_noise/chain_3"} <= last.keys()
    assert launches[1].numbers[0]["train/diagnostics"]["num_logits"] == 4 * 7 * 16


@pytest.mark.parametrize("processes", [2, 4])
def test_predictions_are_those_of_all_members(launches, processes):
    expected = launches[1].find("predictions")["predictions"][0]
    for values in launches[processes].find("predictions").values():
        for value in values:
            real = (value[..., :1] != -100) & (expected[..., :1] != -100)  # other batches, other padding
            assert real.sum() >= 45  # tokens of the seven rows
            torch.testing.assert_close(value * real, expected * real, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("mode", ["greedy", "sampled", "beam"])
def test_generation_with_members_spread_is_that_of_one_process(launches, processes, mode):
    found, expected = launches[processes].find(f"{mode}/"), launches[1].find(f"{mode}/")
    assert len(expected) == 4
    for name, values in found.items():
        assert len(values) == processes
        for value in values:
            torch.testing.assert_close(value, expected[name][0], rtol=1e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize(
    ("work", "positions"),
    [
        ("evaluate", 38),  # terms of the seven rows
        ("predict", 7 * 8),  # their positions, padded
        ("greedy", 3 * 6),
        ("sampled", 3 * 6),
        ("beam", 3 * 3 * 6 + 3 * 6),  # beams, then the best sequences once more
    ],
)
def test_spread_members_send_the_mixture_and_never_each_member(launches, work, positions):
    """Sixteen members, eight a process: were theirs moved, each process would hand on eight times the mixture."""
    mixture = 8 * VOCABULARY * positions  # float64
    for numbers in launches[2].numbers:
        moved = numbers[f"moved/{work}"]
        assert moved["largest"] <= mixture
        # rows are repeated to fill the last batches, predictions are gathered; generators and inputs are exchanged
        assert mixture < moved["bytes"] < 3 * mixture


@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("run", ["train", "data", "gaussian", "laplace"])
def test_all_processes_save_one_posterior(launches, processes, run):
    found, expected = (Posterior.from_pretrained(launches[n].out / run) for n in (processes, 1))
    torch.testing.assert_close(
        found.sample(None, torch.Generator().manual_seed(0)),
        expected.sample(None, torch.Generator().manual_seed(0)),
        rtol=1e-6,
        atol=1e-6,
    )
    assert found.config.member_chains == expected.config.member_chains
    assert not list((launches[processes].out / run).glob("_hf_bayes_*"))
    manifests = [json.loads((launches[n].out / run / MANIFEST).read_text())["files"].keys() for n in (processes, 1)]
    assert manifests[0] == manifests[1]


MEMBERS = {"train": "member_", "moved4/checkpoint-8": "chain_", "moved2/checkpoint-8": "chain_"}
"""Directories, and what begins the name of a member's or chain's files there."""


@pytest.mark.parametrize("directory", MEMBERS)
@pytest.mark.parametrize("processes", LAYOUTS)
def test_each_process_writes_its_members_and_rank_0_the_manifest(launches, processes, directory):
    out, prefix = launches[processes].out / directory, MEMBERS[directory]
    chains, draws = (4 if "4" in directory or directory == "train" else 2), (4 if directory == "train" else 1)
    present = {match[0] for path in out.rglob("*") if (match := re.search(rf"{prefix}\d+", path.name))}
    assert len(present) == chains * draws
    written = [
        {name for name in numbers["writes"] if name.startswith(f"{directory}/")}
        for numbers in launches[processes].numbers
    ]
    own = [{match[0] for name in names if (match := re.search(rf"{prefix}\d+", name))} for names in written]
    owners = processes // min(processes, chains)
    for rank, names in enumerate(written):
        count = chains * draws // min(processes, chains) if rank % owners == 0 else 0  # of replicas the first
        assert len(own[rank]) == count
        assert any(name.endswith(MANIFEST) for name in names) == (rank == 0)
    assert sorted(name for names in own for name in names) == sorted(present)  # each once


@pytest.mark.parametrize("processes", LAYOUTS)
def test_processes_with_other_base_models_are_refused(launches, processes):
    for numbers in launches[processes].numbers:
        said = numbers.get("refused", "")
        assert ("process 1 holds other frozen weights than process 0" in said) == (processes > 1)


@pytest.mark.parametrize("processes", LAYOUTS)
def test_uneven_held_out_batches_are_refused_between_processes(launches, processes):
    for numbers in launches[processes].numbers:
        said = numbers.get("refused/uneven", "")
        assert ("even_batches=False is refused on several processes" in said) == (processes > 1)


@pytest.mark.parametrize("processes", LAYOUTS)
@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        ("same", None),
        ("shard", r"rows: got \d+, expected 24"),
        ("terms", r"likelihood terms: got 169, expected 168"),
        ("shuffle", r"fingerprint of some rows: got \w{16}, expected \w{16}"),
        ("last", r"fingerprint of some rows: got \w{16}, expected \w{16}"),
    ],
)
def test_processes_with_other_rows_are_refused(launches, processes, mistake, words):
    for numbers in launches[processes].numbers:
        said = numbers.get(f"refused/{mistake}")
        if processes == 1 or words is None:
            assert said is None
        else:
            assert re.search(rf"process 1 has another train_dataset than process 0 \({words}\)", said)
            assert "private_rows=True" in said
