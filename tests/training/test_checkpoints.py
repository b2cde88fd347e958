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
from hf_bayes.methods.sgmcmc.sgld import SGLDConfig
from hf_bayes.training import checkpoints
from tests import runs
from tests.faults.attacks import MARKER, payload
from tests.tiny_models import tiny_gpt2, tiny_llama, with_lora

STEPS, CUTS = 12, 10
CYCLES = {"lr_scheduler_type": "cosine_with_restarts", "lr_scheduler_kwargs": {"num_cycles": 2}}


def dropout_model() -> Any:
    return with_lora(tiny_gpt2(resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1))


def trainer(output_dir: Any, method: Any, **changes: Any) -> Any:
    """12 updates of 4 rows out of 10: 3 an epoch, the last of them reaching into the next permutation."""
    settings = {"max_steps": STEPS, "gradient_accumulation_steps": 2, "logging_steps": 1000, **changes}
    return runs.trainer(output_dir, method, **{"model": dropout_model(), **settings})


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
    "warm-started sghmc": (SGHMCConfig(num_chains=2, draws_per_chain=3, warm_start_steps=5), {"minibatch": "shared"}),
}


@pytest.mark.reliability("F4")
@pytest.mark.parametrize("name", RUNS, ids=str)
def test_resume_is_bitwise_from_any_update(tmp_path, name, injected):
    """With dropout, accumulation, in mid-epoch and inside a cosine cycle, at ten random updates."""
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


def test_resume_may_change_the_micro_batch_size(tmp_path):
    method = SGHMCConfig(num_chains=2)
    saving = {"save_strategy": "steps", "save_steps": 4, "model": None}
    whole = trainer(tmp_path, method, **saving)
    whole.train()
    resumed = trainer(tmp_path, method, **saving, per_device_train_batch_size=4, gradient_accumulation_steps=1)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    # float32 sums in another order, over 11 updates
    torch.testing.assert_close(resumed.posterior.sample(None), whole.posterior.sample(None), rtol=0, atol=1e-4)


# -- checkpoints that cannot be resumed ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with checkpoints after updates 2, 4 and 6."""
    directory = tmp_path_factory.mktemp("saved")
    run(directory).train()
    return directory


def run(directory: Path, method: Any = None, **changes: Any) -> Any:
    fields = {"save_strategy": "steps", "save_steps": 2, **changes}
    return runs.trainer(directory, method or SGHMCConfig(num_chains=2, draws_per_chain=2), **fields)


@pytest.fixture
def directory(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "copy"))


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


def test_nothing_to_resume_is_said(tmp_path):
    with pytest.raises(ValueError, match="no complete checkpoint"):
        run(tmp_path).train(resume_from_checkpoint=True)
    with pytest.raises(FileNotFoundError, match="checkpoint-77"):
        run(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-77"))


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


TWO = {"num_chains": 2, "draws_per_chain": 2}
OTHERS = {
    "chains": ({"method": SGHMCConfig(**{**TWO, "num_chains": 3})}, ["method", "'num_chains': 2", "'num_chains': 3"]),
    "field of the method": (
        {"method": SGHMCConfig(**TWO, momentum=0.5)},
        ["method", "'momentum': 0.9", "'momentum': 0.5"],
    ),
    "method": ({"method": SGLDConfig(**TWO)}, ["method", "'sghmc'", "'sgld'"]),
    "learning rate": ({"learning_rate": 0.02}, ["learning_rate: saved 0.01, now 0.02"]),
    "schedule": ({"lr_scheduler_type": "linear"}, ["lr_scheduler_type", "linear"]),
    "warm-up": ({"warmup_steps": 3}, ["warmup_steps: saved 0, now 3"]),
    "length of the data": (
        {"train": runs.token_rows(9)},
        ["num_rows: saved 10, now 9", "num_data: saved 70.0, now 63.0"],
    ),
    "terms of the data": ({"num_data": 99.0}, ["num_data: saved 70.0, now 99.0"]),
    "batch": ({"per_device_train_batch_size": 3}, ["rows_per_update: saved 2, now 3"]),
    "accumulation": ({"gradient_accumulation_steps": 2}, ["rows_per_update: saved 2, now 4"]),
    "minibatches": ({"minibatch": "shared"}, ["minibatch: saved 'independent', now 'shared'"]),
    "length of the run": ({"max_steps": 7}, ["num_steps: saved 6, now 7"]),
    "seed": ({"seed": 1}, ["seed: saved 42, now 1"]),
    "order of the rows": ({"data_seed": 1}, ["data_seed: saved None, now 1"]),
    "subspace": ({"model": lambda: with_lora(tiny_llama(), target_modules=["q_proj"])}, ["parameters"]),
}


@pytest.mark.reliability("B30")
@pytest.mark.parametrize("other", OTHERS, ids=str)
@pytest.mark.parametrize("path", ["given", "found"])
def test_resume_of_another_run_is_refused_with_a_diff(directory, other, path):
    changes, words = OTHERS[other]
    before = sorted(str(file) for file in directory.rglob("*"))
    other_run = run(directory, **{name: value() if name == "model" else value for name, value in changes.items()})
    with pytest.raises(ValueError, match="belongs to another run") as caught:
        other_run.train(resume_from_checkpoint=True if path == "found" else str(directory / "checkpoint-4"))
    assert all(word in str(caught.value) for word in words)
    assert other_run.state.global_step == 0
    assert sorted(str(file) for file in directory.rglob("*")) == before


@pytest.mark.parametrize("prior_mean", ["initial", "zero"])
def test_resume_with_a_prior_at_other_initial_weights_is_refused(tmp_path, prior_mean):
    method = SGHMCConfig(**TWO, prior_mean=prior_mean)
    run(tmp_path, method=method).train()
    other = run(tmp_path, method=method, model=with_lora(tiny_llama(), seed=1))
    if prior_mean == "zero":  # where theta began is no part of the law
        other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
        return
    with pytest.raises(ValueError, match="belongs to another run: prior_mean: saved"):
        other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))


def test_checkpoints_keep_to_their_limit(tmp_path):
    run(tmp_path, save_total_limit=1).train()
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-6"]
