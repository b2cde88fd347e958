"""The probe, what is stored of it, and the command that shows it."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import default_data_collator

from hf_bayes import (
    AGPSConfig,
    EKFConfig,
    MAPConfig,
    MeanFieldConfig,
    PenaltyConfig,
    SGHMCConfig,
    SnapshotConfig,
    SWAGConfig,
)
from hf_bayes.cli.diagnosis_table import table
from hf_bayes.diagnostics.temperatures import share_within_interval
from hf_bayes.distributions.approximations import Draws
from hf_bayes.objectives.passes import MemberPass, MemberPasses
from hf_bayes.training import diagnosis, evaluation
from hf_bayes.training.active_run import ActiveRun
from tests import runs
from tests.methods import ladder_runs
from tests.runs import token_rows
from tests.tiny_models import tiny_llama, with_lora
from tests.training.diagnosed import CONFIG, ONE_DRAW, run


@pytest.mark.parametrize("config", [MeanFieldConfig(num_chains=1), SWAGConfig(rank=2), ONE_DRAW])
def test_methods_that_end_in_states_of_their_chains_say_so(tmp_path: Path, config: Any) -> None:
    approximation = run(tmp_path, config).posterior.approximation
    assert isinstance(approximation, Draws) == config.requirements.draws_are_chain_states


def test_looking_does_not_change_the_chains(tmp_path: Path) -> None:
    draws = []
    for probe_steps in (0, 1):
        model = with_lora(tiny_llama(), lora_dropout=0.3)
        trainer = run(tmp_path, max_steps=6, probe_steps=probe_steps, model=model)
        assert len(trainer.monitor.probes) == 6 * probe_steps
        draws.append(trainer.posterior.approximation.theta)
    assert torch.equal(*draws)


@pytest.mark.filterwarnings("ignore:sghmc at temperature 0")
@pytest.mark.parametrize(
    "config", [dataclasses.replace(CONFIG, temperature=0.0, draws_per_chain=4), SnapshotConfig(num_chains=2)]
)
def test_at_temperature_zero_nothing_is_held_against_a_law(tmp_path: Path, config: Any) -> None:
    found = run(tmp_path, config, gradient_accumulation_steps=2).posterior.config.diagnostics
    assert found["verdict"].startswith("convergence not defined: members of an optimiser are no draws")
    assert found["informed_spread"] is None
    assert found["converged"] is None


def test_distance_in_noise_is_one_for_free_langevin_noise(tmp_path: Path) -> None:
    """Theta diffuses by 2 T l / N: with so little data and a wide prior the gradient is nothing, and momentum is 0."""
    config = SGHMCConfig(num_chains=3, momentum=0.0, prior_std=1e3, temperature=1e4)
    trainer = run(tmp_path, config, learning_rate=1e-4, num_data=1e-3, max_steps=20)
    found = trainer.posterior.config.diagnostics
    assert found["distance_in_noise"] == pytest.approx([1.0] * 3, abs=4 / (2 * 384) ** 0.5)  # chi over 384 coordinates
    assert found["unmoved"] == [0.0] * 3


def test_a_filter_that_leaves_weights_is_not_rounded(tmp_path: Path) -> None:
    """At B = 0 the likelihood does not depend on A, so the first row leaves A as it was."""
    trainer = run(tmp_path, EKFConfig(), learning_rate=None, max_steps=4, model=with_lora(tiny_llama(), init_b=0.0))
    assert float(trainer.monitor.totals["unmoved"].max()) > 0.1
    assert "rounding" not in trainer.posterior.config.diagnostics["verdict"]


def test_a_warm_start_does_not_hide_chains_that_stand_still(tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, warm_start_steps=6, warm_start_learning_rate=1e-2)
    found = run(tmp_path, config, learning_rate=1e-10).posterior.config.diagnostics
    assert found["verdict"].startswith("the chains did not move")
    assert max(found["distance_in_noise"]) < 10  # in the momentum they begin with, not in AdamW's steps: 5000


def test_updates_without_movement_do_not_count_as_noise(tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, preconditioner="layerwise", preconditioner_batches=2)
    trainer = run(tmp_path, config, gradient_accumulation_steps=2)
    moved = 24 - 6 * 2  # six cycles of four updates, two of them an estimate
    assert trainer.monitor.totals["rates"].tolist() == pytest.approx([moved * 1e-2] * 3)
    assert trainer.monitor.sums["noise_ratio"][:, 1].tolist() == [moved / 2] * 3  # after burn-in


@pytest.mark.parametrize(
    ("rows", "accumulation", "wanted", "measured"),
    [(2, 1, None, True), (1, 2, None, True), (1, 1, None, False), (2, 1, False, False), (1, 2, False, False)],
)
def test_minibatch_noise_is_reported_for_two_or_more_rows(
    tmp_path: Path, rows: int, accumulation: int, wanted: bool | None, measured: bool
) -> None:
    fields = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": accumulation}
    config = dataclasses.replace(CONFIG, measure_gradient_noise=wanted)
    trainer = run(tmp_path, config, max_steps=6, logging_steps=6, **fields)
    posterior = trainer.posterior
    assert (posterior.config.diagnostics["noise_ratio"] is not None) == measured
    assert ("noise_ratio/chain_2" in trainer.state.log_history[0]) == measured
    console = Console(width=200)
    with console.capture() as capture:
        console.print(table(posterior.config.to_dict()))
    assert ("takes 2 rows an update" in capture.get()) != measured


def test_the_noise_of_updates_is_averaged_and_not_its_reciprocal(tmp_path: Path) -> None:
    trainer = run(tmp_path, max_steps=12, logging_steps=1, gradient_accumulation_steps=2)
    entries = [entry for entry in trainer.state.log_history if "loss" in entry and entry["step"] > 6]
    for chain, found in enumerate(trainer.posterior.config.diagnostics["noise_ratio"]):
        inverses = [1 / entry[f"noise_ratio/chain_{chain}"] for entry in entries]
        assert len(inverses) == 6
        assert 1 / found == pytest.approx(sum(inverses) / 6)


@pytest.mark.parametrize("minibatch", ["independent", "shared"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_measuring_noise_by_parts_does_not_change_the_chains(tmp_path: Path, minibatch: str, dropout: float) -> None:
    """Check the random numbers drawn beside them, too: the collator draws from torch's own generator."""
    draws, drawn = [], []
    for wanted in (None, False):
        seen: list[float] = []

        def collate(rows: list[Any], seen: list[float] = seen) -> Any:
            seen.append(float(torch.rand(())))
            return default_data_collator(rows)

        config = dataclasses.replace(CONFIG, measure_gradient_noise=wanted, burn_in=2)
        model = with_lora(tiny_llama(), lora_dropout=dropout)
        trainer = run(tmp_path, config, max_steps=6, model=model, minibatch=minibatch, collator=collate)
        assert ("noise_ratio" in trainer.monitor.noise_info) == (wanted is None)
        draws.append(trainer.posterior.approximation.theta)
        drawn.append(seen)
    assert torch.equal(*draws)
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize("minibatch", ["independent", "shared"])
@pytest.mark.parametrize(("subspace", "dropout"), [("trainable", 0.0), ("last_block", 0.0), ("trainable", 0.3)])
def test_parts_of_a_micro_batch_add_up_to_its_gradient(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, minibatch: str, subspace: str, dropout: float
) -> None:
    """Rows of many lengths, an odd number of them, chains in passes of two."""
    seen: list[tuple[int, MemberPass, Any]] = []
    of_batch = MemberPasses.of_batch

    def watch(self: MemberPasses, theta: Any, batch: Any, **options: Any) -> Iterator[MemberPass]:
        for one in of_batch(self, theta, batch, **options):
            assert one.grad is not None
            seen.append((len(batch["input_ids"]) // self.num_groups, one._replace(grad=one.grad.clone()), batch))
            yield one

    monkeypatch.setattr(MemberPasses, "of_batch", watch)
    model = tiny_llama() if subspace == "last_block" else with_lora(tiny_llama(), lora_dropout=dropout)
    changes: dict[str, Any] = {
        "subspace": subspace, "minibatch": minibatch, "train": token_rows([8, 5, 7, 8, 3, 8, 6]), "members_per_pass": 2,
        "collator": runs.padding_collator(), "per_device_train_batch_size": 5, "model": model, "max_steps": 1,
    }  # fmt: skip
    trainer = run(tmp_path, dataclasses.replace(ONE_DRAW, burn_in=0), map_updates=0, **changes)
    update = seen[1:]  # after the one that is timed
    firsts = [one for rows, one, _ in update if rows == 1]
    assert [one.members for one in firsts] == [slice(0, 2), slice(2, 3)]
    # masks differ: neither part is what the other leaves
    assert [one.members for rows, one, _ in update if rows == 4] == ([one.members for one in firsts] if dropout else [])
    if dropout:
        return
    wholes = [(one, batch) for rows, one, batch in update if rows == 5]
    passes = trainer.active.objective.passes
    chosen = (torch.arange(5).repeat(passes.num_groups) >= 1).nonzero()[:, 0]
    second = trainer.bayesian.take_rows(wholes[0][1], chosen)
    theta, chunks = runs.origin(trainer), [one.members for one in firsts]
    trainer.bayesian.train()
    rests = of_batch(passes, theta, second, gradient=True, step=0, micro=1, chunks=chunks)
    for (whole, _), first, rest in zip(wholes, firsts, rests, strict=True):
        assert whole.grad is not None
        assert float(rest.grad.norm()) > 0.1 * float(whole.grad.norm()) > 0
        # float32, sums of 35 terms in another order
        torch.testing.assert_close(
            first.grad + rest.grad, whole.grad, rtol=1e-4, atol=1e-4 * float(whole.grad.abs().max())
        )


def test_a_resumed_run_logs_the_same_noise(tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, burn_in=2)  # written after the third update, and after the last
    whole = run(tmp_path / "whole", config, max_steps=12)
    run(tmp_path / "cut", config, max_steps=12, save_strategy="steps", save_steps=5)
    resumed = runs.trainer(tmp_path / "cut", config, max_steps=12, probe_steps=2, logging_steps=3)
    resumed.train(resume_from_checkpoint=str(tmp_path / "cut" / "checkpoint-5"))
    told = [
        [{name: value for name, value in entry.items() if "/chain_" in name or "probe_" in name} for entry in history]
        for history in (whole.state.log_history, resumed.state.log_history)
    ]
    assert told[0] == told[1]
    assert "noise_ratio/chain_0" in told[0][1]  # update 6
    looks = [trainer.monitor.probe_logits for trainer in (whole, resumed)]
    assert torch.equal(*map(torch.stack, looks))


def test_a_penalty_run_stores_how_often_its_noise_was_too_large(tmp_path: Path) -> None:
    config = PenaltyConfig(num_chains=2, draws_per_chain=3, step_size=1e-4, target_acceptance=None)
    found = run(tmp_path, config, gradient_accumulation_steps=4, max_steps=12).posterior.config.diagnostics
    assert all(0 <= share <= 1 for share in found["beyond_series"])
    assert all(penalty > 0 for penalty in found["penalty"])


def test_a_resumed_run_has_the_looks_of_the_whole_one(tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, warm_start_steps=3)
    whole = run(tmp_path / "whole", config, max_steps=12)
    run(tmp_path / "cut", config, max_steps=12, save_strategy="steps", save_steps=5)
    resumed = runs.trainer(tmp_path / "cut", config, max_steps=12, probe_steps=2, logging_steps=3)
    resumed.train(resume_from_checkpoint=str(tmp_path / "cut" / "checkpoint-5"))
    assert resumed.posterior.config.diagnostics == whole.posterior.config.diagnostics
    assert resumed.posterior.trace == whole.posterior.trace


# ------------------------------------------------------------------------------------------------- stored and shown


def test_the_limit_of_some_terms_stands_beside_the_nll_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "MAX_KEPT", 9 * 8)  # 8 terms of 9 members
    trainer = run(tmp_path, eval_dataset=token_rows(8, seed=1))
    trainer.save_model()
    risk, metrics = trainer.posterior.trace["risk"], trainer.posterior.config.metrics
    assert risk["num_terms"] == 8  # of 56
    assert risk["risks"][-1] == pytest.approx(metrics["nll"], rel=1e-6)
    whole = trainer.outcome.evaluator.latest.member_log_lik
    assert abs(float(-(whole.logsumexp(-1) - math.log(9)).mean()) - metrics["nll"]) > 1e-3  # these 8 are not all
    assert metrics["limit_nll"] < metrics["nll"]


# -------------------------------------------------------------------------------------------------- Jensen posterior


def test_temperatures_are_compared_at_every_update(tmp_path: Path) -> None:
    trainer = run(tmp_path, dataclasses.replace(ONE_DRAW, burn_in=0.0), max_steps=1)
    state, layout = trainer.run.state, trainer.bayesian.layout
    kinetic = torch.stack([part.square().mean(1) for part in state.momentum.split(layout.sizes, 1)], 1)
    law = trainer.monitor.info["kinetic_temperature_law"]
    share = share_within_interval(kinetic, layout.sizes, law)
    assert trainer.posterior.config.diagnostics["kinetic_inside"] == pytest.approx(share.tolist())
    hot = run(tmp_path, ONE_DRAW, learning_rate=0.3, max_steps=20, num_data=1e5)  # heated by minibatches
    assert max(hot.posterior.config.diagnostics["kinetic_inside"]) < 0.9


@pytest.mark.parametrize(("method", "rate", "level"), [(CONFIG, 1e-10, "WARNING"), (MAPConfig(), 1e-2, "INFO")])
def test_the_verdict_is_told_at_the_end_of_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, method: Any, rate: float, level: str
) -> None:
    with caplog.at_level(logging.INFO, logger="hf_bayes.training.trainer"):
        trainer = run(tmp_path, method, learning_rate=rate)
    verdict = trainer.posterior.config.diagnostics["verdict"]
    told = [r for r in caplog.records if r.getMessage().endswith(f": {verdict}")]
    assert [(r.levelname, r.getMessage().startswith(f"{method.name}: ")) for r in told] == [(level, True)]


def test_an_adaptive_proposal_at_its_cap_is_told_of(tmp_path: Path) -> None:
    found = run(tmp_path, AGPSConfig(num_chains=2, draws_per_chain=4), learning_rate=1e-3).posterior.config.diagnostics
    assert min(found["capped"]) > 0.05
    assert "are at the cap of the proposal's standard deviation" in found["verdict"]


def test_a_rounded_chain_of_another_process_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gather = ActiveRun.of_all_chains

    def with_others(self: ActiveRun, info: dict[str, Any]) -> dict[str, Any]:
        if "loss" not in info:  # at the end, for the posterior
            return gather(self, info)
        return {name: torch.cat([value, 0 * value + (name == "unmoved")]) for name, value in info.items()}

    monkeypatch.setattr(ActiveRun, "of_all_chains", with_others)
    logs = run(tmp_path).state.log_history
    assert "left 100 % of the weights of chain 3 as they were" in caplog.text
    assert caplog.text.count("weights of chain") == 1
    assert not any(name.startswith("unmoved") for entry in logs for name in entry)


def test_distances_are_in_units_of_the_chosen_rungs_prior(tmp_path: Path) -> None:
    trainer = ladder_runs.trainer(tmp_path, ladder_runs.config(ladder={"prior_scale": [0.5, 0.25]}))
    trainer.train()
    scale, theta, active = trainer.method.prior_scale, trainer.run.theta, trainer.active
    assert scale < 1
    width = scale * active.prior.std.to(theta)
    expected = ((theta - active.monitor.origin) / width).square().mean(1).sqrt()
    assert trainer.posterior.config.diagnostics["distance"] == pytest.approx(expected.tolist())


def test_a_lost_prior_density_is_that_of_the_chosen_rung(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(diagnosis, "prior_loss_ratio", lambda prior, *args, **options: given.append(prior))
    trainer = ladder_runs.trainer(tmp_path, ladder_runs.config(ladder={"prior_scale": [0.5, 0.25]}))
    trainer.train()
    assert torch.equal(given[-1].std, trainer.method.prior_scale * trainer.active.prior.std)
