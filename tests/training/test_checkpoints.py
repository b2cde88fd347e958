from __future__ import annotations

import contextlib
import json
import os
import pickle
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerCallback

from hf_bayes.chains.run import Run
from hf_bayes.core.schedules import Cyclical
from hf_bayes.methods.registry import METHODS
from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from hf_bayes.training import checkpoints
from tests.faults.attacks import MARKER, payload
from tests.tiny_models import tiny_gpt2, with_lora
from tests.training.checkpointed import CUTS, STEPS, run, trainer

CYCLES = {"lr_scheduler_type": "cosine_with_restarts", "lr_scheduler_kwargs": {"num_cycles": 2}}


def everything(trainer: Any) -> dict[str, torch.Tensor]:
    """All that a run has to show: state, generators, draws, diagnostics, posterior."""
    run, scheduler = trainer.run, trainer.lr_scheduler
    rates = {} if scheduler is None else {"lr": torch.tensor(scheduler.get_last_lr())}  # none: it was finished already
    return {
        **{f"state.{name}": value for name, value in run.state._asdict().items()},
        **{f"generator.{chain}": rng.get_state() for chain, rng in enumerate(run.rngs)},
        **{f"draw.{index}": draw for index, draw in enumerate(run.draws)},
        **{f"mean.{name}": value for name, value in trainer.monitor.mean_info().items()},
        "members": trainer.bayesian.current,
        **rates,
    }


def assert_same_run(a: Any, b: Any) -> None:
    ours, theirs = everything(a), everything(b)
    assert ours.keys() == theirs.keys()
    different = [name for name, value in ours.items() if not torch.equal(value, theirs[name])]
    assert not different


RUNS = {
    "sghmc": (SGHMCConfig(num_chains=2, draws_per_chain=3), CYCLES),
    "cyclical sghmc, layerwise": (
        SGHMCConfig(
            num_chains=2,
            draws_per_chain=2,
            thin=4,
            schedule=Cyclical(ramp_up=0.5),
            preconditioner="layerwise",
            preconditioner_batches=2,
        ),
        {},
    ),
    "sgnht": (METHODS["sgnht"](num_chains=2, draws_per_chain=3), CYCLES),
    "mean_field": (METHODS["mean_field"](num_chains=2), CYCLES),
    "hmc": (METHODS["hmc"](num_chains=2, draws_per_chain=2, num_leapfrog=2), {}),
    "sghmc, its own step size": (
        SGHMCConfig(num_chains=2, draws_per_chain=3, warm_start_steps=1),
        {"learning_rate": None},
    ),
    "warm-started sghmc": (SGHMCConfig(num_chains=2, draws_per_chain=3, warm_start_steps=5), {"minibatch": "shared"}),
}


@pytest.mark.reliability("F4")
@pytest.mark.parametrize("name", RUNS, ids=str)
def test_resume_is_bitwise_from_any_update(tmp_path, name, injected):
    """The runs have dropout, accumulation and a cosine cycle; ten random updates are also in mid-epoch."""
    injected(CUTS)
    method, changes = RUNS[name]
    whole = trainer(tmp_path, method, save_strategy="steps", save_steps=1, **changes)
    whole.train()
    for cut in sorted(random.Random(name).sample(range(1, STEPS), CUTS)):
        resumed = trainer(tmp_path / "resumed", method, **changes)
        resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{cut}"))
        assert_same_run(resumed, whole)


@pytest.mark.parametrize("name", ["metropolis", "hmc", "gps", "penalty"])
def test_losses_of_rejected_moves_are_logged_alike_after_resume(tmp_path, name):
    """The checkpoint's own loss, and not that of the proposal that was refused after it; at first that of the start."""
    method, rate = METHODS[name](num_chains=2), 50.0  # so far that Metropolis accepts nothing
    changes = {"model": with_lora(tiny_gpt2()), "logging_steps": 1, "max_steps": 6, "learning_rate": rate}

    def losses(run: Any) -> list[dict[str, float]]:
        own = ("loss/chain_0", "loss/chain_1")
        return [{key: log[key] for key in own} for log in run.state.log_history if own[0] in log]

    whole = trainer(tmp_path, method, save_strategy="steps", save_steps=1, **changes)
    whole.train()
    assert len(losses(whole)) == 6
    if name == "metropolis":
        assert len({log["loss/chain_0"] for log in losses(whole)}) == 1
        start = trainer(
            tmp_path / "start", method, **{**changes, "model": with_lora(tiny_gpt2()), "learning_rate": 1e-9}
        )
        start.train()
        assert losses(start)[0] == pytest.approx(losses(whole)[0], rel=1e-5)
    resumed = trainer(tmp_path / "resumed", method, **{**changes, "model": with_lora(tiny_gpt2())})
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert losses(resumed) == losses(whole)


class Start(TrainerCallback):
    """Remembers at which step a run began."""

    def on_train_begin(self, args, state, control, **kwargs):
        self.step = state.global_step


class Killed(Exception):
    pass


class KillAt(TrainerCallback):
    """Ends the run after the first micro-batch of a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step + 1 == self.step:
            raise Killed


@pytest.mark.reliability("F4")
@pytest.mark.parametrize("workers", [0, 1])
def test_a_killed_run_resumes_from_its_last_checkpoint(tmp_path, workers):
    method, changes = RUNS["sghmc"]
    changes = {**changes, "dataloader_num_workers": workers, "max_steps": 9}
    whole = trainer(tmp_path / "whole", method, **changes)
    whole.train()
    saving = {"save_strategy": "steps", "save_steps": 2}
    with pytest.raises(Killed):
        trainer(tmp_path, method, callbacks=[KillAt(6)], **saving, **changes).train()
    resumed = trainer(tmp_path, method, **saving, **changes)
    resumed.add_callback(start := Start())
    resumed.train(resume_from_checkpoint=True)
    assert start.step == 4
    assert_same_run(resumed, whole)


@pytest.mark.slow
@pytest.mark.reliability("F4")
def test_runs_killed_at_random_times_go_on_to_the_same_end(tmp_path, injected):
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.resumes", str(tmp_path), "10", "0"],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    injected(10)
    assert sum(found.values()) == 10
    assert found.keys() <= {"same", "same, from the start"}
    assert found["same"] > 0


@pytest.mark.reliability("F4", twin=True)
def test_a_generator_that_is_not_restored_is_caught(tmp_path, monkeypatch):
    method, changes = RUNS["sghmc"]
    whole = trainer(tmp_path, method, save_strategy="steps", save_steps=4, **changes)
    whole.train()
    load = Run.load_state_dict

    def forgetful(self: Run, *args: Any) -> None:
        load(self, *args)
        self.rngs[0].manual_seed(0)

    monkeypatch.setattr(Run, "load_state_dict", forgetful)
    resumed = trainer(tmp_path / "resumed", method, **changes)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    with pytest.raises(AssertionError, match=r"generator\.0"):
        assert_same_run(resumed, whole)


# -- checkpoints that cannot be resumed ------------------------------------------------------------------------------


STATE_FILES = [
    "trainer_state.json",
    "optimizer.pt",
    "scheduler.pt",
    "rng_state.pth",
    "chains/chain_000.safetensors",
    "chains/chain_001.safetensors",
    "chains/settings.json",
    "chains/manifest.json",
    "checkpoint_manifest.json",
]


def test_every_file_of_a_checkpoint_is_known_here(saved):
    found = {
        str(path.relative_to(saved / "checkpoint-4")) for path in (saved / "checkpoint-4").rglob("*") if path.is_file()
    }
    # args are not state: a resumed run has its own
    assert found - {"training_args.bin"} == set(STATE_FILES)


@pytest.mark.reliability("F5")
@pytest.mark.parametrize("name", STATE_FILES)
def test_a_missing_state_file_is_named(directory, name):
    (directory / "checkpoint-4" / name).unlink()
    with pytest.raises((OSError, ValueError), match=Path(name).name.replace(".", r"\.")):
        run(directory).train(resume_from_checkpoint=str(directory / "checkpoint-4"))


@pytest.mark.reliability("F5")
@pytest.mark.parametrize("name", STATE_FILES)
@pytest.mark.parametrize("fault", ["truncated", "bit flipped"])
def test_a_damaged_state_file_is_named(directory, name, fault):
    file = directory / "checkpoint-4" / name
    data = bytearray(file.read_bytes())
    if fault == "truncated":
        data = data[: len(data) // 2]
    else:
        data[len(data) // 2] ^= 4
    file.write_bytes(data)
    with pytest.raises((OSError, ValueError), match=Path(name).name.replace(".", r"\.")):
        run(directory).train(resume_from_checkpoint=str(directory / "checkpoint-4"))


@pytest.mark.reliability("F5")
@pytest.mark.parametrize("name", STATE_FILES)
def test_an_unfinished_newest_checkpoint_is_passed_over(directory, name):
    (directory / "checkpoint-6" / name).unlink()
    assert checkpoints.newest_complete(directory) == str(directory / "checkpoint-4")
    resumed = run(directory)
    resumed.add_callback(start := Start())
    resumed.train(resume_from_checkpoint=True)
    assert start.step == 4


TRAINER_FILES = [name for name in STATE_FILES if "/" not in name]


@pytest.mark.reliability("F5")
@pytest.mark.parametrize("name", [name for name in TRAINER_FILES if name != "checkpoint_manifest.json"])
def test_an_exchanged_file_is_refused_before_it_is_read(directory, name, monkeypatch):
    """A file that transformers would load without a word."""
    if name.endswith(".json"):
        shutil.copy(directory / "checkpoint-2" / name, directory / "checkpoint-4" / name)
    else:
        torch.save({"other": torch.ones(3)}, directory / "checkpoint-4" / name)
    read: list[str] = []
    monkeypatch.setattr(torch, "load", lambda file, *args, **kwargs: read.append(str(file)))
    with pytest.raises(ValueError, match=f"{re.escape(name)} is not the file that checkpoint_manifest.json lists"):
        run(directory).train(resume_from_checkpoint=str(directory / "checkpoint-4"))
    assert not read
    assert checkpoints.newest_complete(directory) == str(directory / "checkpoint-6")


@pytest.mark.parametrize("name", ["rng_state_1.pth", "scaler.pt", "optimizer.bin"])
def test_a_file_that_no_manifest_lists_is_refused(directory, name):
    torch.save({}, directory / "checkpoint-6" / name)
    with pytest.raises(ValueError, match=f"checkpoint_manifest.json does not list {re.escape(name)}"):
        run(directory).train(resume_from_checkpoint=str(directory / "checkpoint-6"))
    assert checkpoints.newest_complete(directory) == str(directory / "checkpoint-4")


def test_chains_of_another_checkpoint_are_refused(directory):
    shutil.rmtree(directory / "checkpoint-4" / "chains")
    shutil.copytree(directory / "checkpoint-2" / "chains", directory / "checkpoint-4" / "chains")
    with pytest.raises(ValueError, match=r"chains/manifest\.json is not the file"):
        run(directory).train(resume_from_checkpoint=str(directory / "checkpoint-4"))


@pytest.mark.parametrize("hook", ["_save_optimizer_and_scheduler", "_save_rng_state"])
def test_a_save_killed_over_an_old_checkpoint_is_unfinished(directory, monkeypatch, hook):
    def killed(*args: Any, **kwargs: Any) -> None:
        raise Killed

    monkeypatch.setattr(Trainer, hook, killed)
    with pytest.raises(Killed):
        run(directory).train()
    assert checkpoints.newest_complete(directory) == str(directory / "checkpoint-6")
    shutil.rmtree(directory / "checkpoint-6")
    shutil.rmtree(directory / "checkpoint-4")
    assert checkpoints.newest_complete(directory) is None


def test_older_checkpoints_go_only_once_the_new_one_is_sealed(tmp_path, monkeypatch):
    sealed = checkpoints.seal_checkpoint

    def killed(checkpoint: Path, **kwargs: Any) -> None:
        if checkpoint.name == "checkpoint-4":
            raise Killed
        sealed(checkpoint, **kwargs)

    monkeypatch.setattr(checkpoints, "seal_checkpoint", killed)
    with pytest.raises(Killed):
        run(tmp_path, save_total_limit=1).train()
    assert checkpoints.newest_complete(tmp_path) == str(tmp_path / "checkpoint-2")


@pytest.mark.parametrize("name", ["trainer_state.json", "optimizer.pt", "chains/chain_001.safetensors"])
def test_a_half_written_newest_checkpoint_is_passed_over(directory, name):
    file = directory / "checkpoint-6" / name
    file.write_bytes(file.read_bytes()[:100])
    assert checkpoints.newest_complete(directory) == str(directory / "checkpoint-4")


def test_newest_means_the_highest_step(directory):
    assert checkpoints.newest_complete(directory) == str(directory / "checkpoint-6")
    shutil.copytree(directory / "checkpoint-6", directory / "checkpoint-10")
    (directory / "checkpoint-best").mkdir()
    assert checkpoints.newest_complete(directory) == str(directory / "checkpoint-10")


FOREIGN_FILES = ["training_args.bin", "custom_checkpoint_0.pkl", "pytorch_model.bin", "adapter_model.bin", "scaler.pt"]


@pytest.mark.slow
@pytest.mark.reliability("F8")
@pytest.mark.parametrize("name", [*STATE_FILES, *FOREIGN_FILES])
def test_a_pickle_in_a_checkpoint_is_not_run(directory, name):
    file = directory / "checkpoint-4" / name
    file.write_bytes(payload(directory))
    with contextlib.suppress(Exception):  # refused, or never opened
        run(directory).train(resume_from_checkpoint=str(directory / "checkpoint-4"))
    assert not (directory.parent / MARKER).exists()


@pytest.mark.reliability("F8", twin=True)
def test_that_pickle_would_run(directory):
    pickle.loads(payload(directory))
    assert (directory.parent / MARKER).exists()


def test_checkpoints_keep_to_their_limit(tmp_path):
    run(tmp_path, save_total_limit=1).train()
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-6"]
