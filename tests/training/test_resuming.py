from __future__ import annotations

import collections
from pathlib import Path

import pytest
import torch

from hf_bayes.methods.averaging.ensemble import EnsembleConfig
from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from hf_bayes.methods.sgmcmc.sgld import SGLDConfig
from hf_bayes.posteriors.storage import Alone
from hf_bayes.training import checkpoints, session
from hf_bayes.training.resuming import RunCheckpoints
from tests import runs
from tests.tiny_models import tiny_llama, with_lora
from tests.training.checkpointed import run, trainer


def test_resume_may_change_the_micro_batch_size(tmp_path):
    method = SGHMCConfig(num_chains=2)
    saving = {"save_strategy": "steps", "save_steps": 4, "model": None}
    whole = trainer(tmp_path, method, **saving)
    whole.train()
    resumed = trainer(tmp_path, method, **saving, per_device_train_batch_size=4, gradient_accumulation_steps=1)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    # float32 sums in another order, over 11 updates
    torch.testing.assert_close(resumed.posterior.sample(None), whole.posterior.sample(None), rtol=0, atol=1e-4)


@pytest.mark.parametrize("ladder", [{"temperature": (1.0, 0.1)}, {"prior_scale": (1.0, 2.0)}])
def test_a_ladder_resumes_bitwise_after_its_choice(tmp_path, ladder):
    method = SGHMCConfig(num_chains=2, draws_per_chain=2, prior_std=0.1, ladder=ladder)
    changes = {"learning_rate": None, "max_steps": 120, "save_strategy": "steps", "save_steps": 90}

    def fresh():
        return runs.trainer(tmp_path, method, eval_dataset=runs.token_rows(40, seed=5), **changes)

    whole, resumed = fresh(), fresh()
    whole.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-90"))
    assert len(set(whole.run.state.ladder_rung.tolist())) == 1  # the rung was chosen before update 90
    assert torch.equal(resumed.posterior.approximation.theta, whole.posterior.approximation.theta)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_each_run_of_a_trainer_resumes_bitwise(tmp_path, dropout):
    def fresh():
        changes = {"save_strategy": "steps", "save_steps": 4, "model": with_lora(tiny_llama(), lora_dropout=dropout)}
        return trainer(tmp_path, SGHMCConfig(num_chains=2), **changes)

    whole, other = fresh(), fresh()
    whole.train()
    first = whole.posterior.approximation
    whole.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert runs.equal(whole.posterior.approximation, first)  # it is the first run again, and not a second one
    whole.train()
    second = whole.posterior.approximation
    assert not runs.equal(second, first)
    other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))  # of the second run, in another process
    assert runs.equal(other.posterior.approximation, second)


TWO = {"num_chains": 2, "draws_per_chain": 2}

OTHERS = {
    "chains": ({"method": SGHMCConfig(**{**TWO, "num_chains": 3})}, ["method.num_chains: saved 2, now 3"]),
    "field of the method": (
        {"method": SGHMCConfig(**TWO, momentum=0.5)},
        ["another run: method.momentum: saved 0.9, now 0.5. Resume with", "or begin anew"],
    ),
    "method": ({"method": SGLDConfig(**TWO)}, ["method: saved 'sghmc', now 'sgld'"]),
    "learning rate": ({"learning_rate": 0.02}, ["learning_rate: saved 0.01, now 0.02"]),
    "schedule": ({"lr_scheduler_type": "linear"}, ["lr_scheduler_type", "linear"]),
    "warm-up": ({"warmup_steps": 3, "lr_scheduler_type": "constant_with_warmup"}, ["warmup_steps: saved 0, now 3"]),
    "length of the data": (
        {"train": runs.token_rows(9)},
        ["num_rows: saved 10, now 9", "num_data: saved 70.0, now 63.0"],
    ),
    "terms of the data": ({"num_data": 99.0}, ["num_data: saved 70.0, now 99.0"]),
    "batch": (
        {"per_device_train_batch_size": 3},
        ["rows in an update (per_device_train_batch_size, ", "saved 2, now 3"],
    ),
    "accumulation": ({"gradient_accumulation_steps": 2}, ["gradient_accumulation_steps): saved 2, now 4"]),
    "minibatches": ({"minibatch": "shared"}, ["minibatch: saved 'independent', now 'shared'"]),
    "length of the run": ({"max_steps": 7}, ["updates of the run (max_steps, or num_train_epochs): saved 6, now 7"]),
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


def test_a_given_rate_for_a_found_one_is_said(tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "map_updates": 0}
    runs.trainer(tmp_path, EnsembleConfig(num_chains=2), learning_rate=None, **saving).train()
    other = runs.trainer(tmp_path, EnsembleConfig(num_chains=2), learning_rate=1e-3, **saving)
    with pytest.raises(ValueError, match=r"another run: learning_rate: saved None, now 0\.001; method") as caught:
        other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert "has found" not in str(caught.value)
    assert "num_chains" not in str(caught.value)


def test_a_refused_resume_keeps_the_run_before_it(tmp_path):
    trained = run(tmp_path)
    trained.train()
    before = trained.active, trained.diagnosis, trained.posterior
    trained.args.seed = 1
    with pytest.raises(ValueError, match="belongs to another run: seed"):
        trained.train(resume_from_checkpoint=True)
    after = trained.active, trained.diagnosis, trained.posterior
    assert all(old is new for old, new in zip(before, after, strict=True))


@pytest.mark.parametrize("resume", [True, "checkpoint-4", "checkpoint-6"])
def test_a_resume_checks_every_file_twice(directory, monkeypatch, resume):
    """The first check is before anything else; the second is right before Trainer unpickles its files."""
    counts = collections.Counter()
    check_seal, read_directory = checkpoints.check_seal, checkpoints.read_directory

    def counted_seal(folder, **options):
        counts["files of the seal"] += 1
        return check_seal(folder, **options)

    def counted_read(folder, **options):
        counts["chain 1"] += options["only"]("chain_001.safetensors")
        return read_directory(folder, **options)

    monkeypatch.setattr(checkpoints, "check_seal", counted_seal)
    monkeypatch.setattr(checkpoints, "read_directory", counted_read)
    run(directory, save_strategy="no").train(resume_from_checkpoint=resume if resume is True else directory / resume)
    assert counts == {"files of the seal": 2, "chain 1": 2}


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "chains/chain_000.safetensors"])
def test_a_file_exchanged_after_the_first_check_is_refused(directory, monkeypatch, name):
    """Trainer would unpickle what was put there while the run began."""
    file, announced = directory / "checkpoint-4" / name, session.announce

    def exchanged(active):
        file.write_bytes(file.read_bytes()[::-1])
        announced(active)

    monkeypatch.setattr(session, "announce", exchanged)
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("it was unpickled"))
    with pytest.raises(ValueError, match=Path(name).name.replace(".", r"\.")):
        run(directory).train(resume_from_checkpoint=str(directory / "checkpoint-4"))


def test_a_check_of_a_checkpoint_changes_nothing(directory):
    active = runs.started(run(directory))
    theta, before = active.run.theta.clone(), (active.run, active.objective, active.number)
    RunCheckpoints(active, identified=True).check(checkpoints.verified(directory / "checkpoint-4"))
    assert (active.run, active.objective, active.number) == before
    assert active.run.num_updates == 0
    assert torch.equal(active.run.theta, theta)


def test_chains_beyond_a_thousand_keep_their_numbers(tmp_path: Path) -> None:
    tensors = {chain: {"draws": torch.full((1,), float(chain))} for chain in (100, 1000, 1009)}
    checkpoints.save(tmp_path, tensors, {}, group=Alone())
    for name in (*checkpoints.TRAINER_FILES, "rng_state.pth"):
        (tmp_path / name).touch()
    checkpoints.seal_checkpoint(tmp_path, group=Alone())
    saved = checkpoints.verified(tmp_path)
    found = checkpoints.load(saved, {}, chains=range(100, 1001, 900))
    assert {chain: float(content["draws"]) for chain, content in found.items()} == {100: 100.0, 1000: 1000.0}
    with pytest.raises(ValueError, match=r"manifest\.json does not list chain_101\.safetensors"):
        checkpoints.load(saved, {}, chains=range(100, 102))
