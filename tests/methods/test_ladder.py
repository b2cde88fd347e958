"""A ladder of settings: chains as in runs of their own, one choice by held-out rows, and the same chains afterwards."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_bayes import LaplaceConfig, MAPConfig, SGHMCConfig, sample
from hf_bayes.methods import ladder
from hf_bayes.methods.registry import from_dict
from hf_bayes.training.checks.rows import require_all_chains
from tests import runs
from tests.methods.ladder_runs import CHOICE, LADDER, STEPS, WARM, Watch, config, trainer
from tests.tiny_models import tiny_bert
from tests.training.trained import StopAfter


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("sghmc", {}),
        ("sghmc", {"learning_rate": None}),
        ("sgld", {}),
        ("sgld", {"learning_rate": None, "gradient_accumulation_steps": 2, "max_steps": 50}),
        ("baoab", {"learning_rate": None}),
        ("sgnht", {}),
    ],
)
def test_the_chains_of_a_rung_equal_a_run_with_its_settings(tmp_path: Path, name: str, changes: dict[str, Any]) -> None:
    def watched(directory: str, **settings: Any) -> Watch:
        watch = Watch()
        run = trainer(tmp_path / directory, config(name, **settings, **WARM), watch, **changes)
        run.add_callback(StopAfter(CHOICE - 1))  # what comes later is not compared
        run.train()
        return watch

    watch = watched("ladder")
    for rung, (temperature, scale) in enumerate(zip(*LADDER.values(), strict=True)):
        alone = watched(f"alone{rung}", ladder=None, temperature=temperature, prior_scale=scale)
        assert len(alone.theta) == len(watch.theta) == CHOICE - 1
        for ours, theirs in zip(watch.theta, alone.theta, strict=True):
            if changes:  # whitened coordinates: products with the roots of 2 and of 4 chains round differently
                torch.testing.assert_close(ours[rung::2], theirs[rung::2], rtol=1e-3, atol=1e-4)
            else:
                assert torch.equal(ours[rung::2], theirs[rung::2])
        assert (watch.theta[-1][1 - rung :: 2] - alone.theta[-1][1 - rung :: 2]).abs().max() > 0.01


def test_the_choice_is_the_lowest_nll_of_a_rungs_mixture(tmp_path: Path) -> None:
    watch = Watch()
    run = trainer(tmp_path, config(), watch)
    run.train()
    found = run.posterior.config.diagnostics
    no_passes = SimpleNamespace(early_passes={})
    looks = ladder.with_ladder(config(), run.active.problem, lambda *args: no_passes).early_passes
    assert (len(looks), max(looks)) == (ladder.NUM_LOOKS, CHOICE)
    assert min(looks) > CHOICE - STEPS // 8
    batch = {
        "input_ids": torch.tensor(run.eval_dataset["input_ids"]), "labels": torch.tensor(run.eval_dataset["label"]),
        "attention_mask": torch.tensor(run.eval_dataset["attention_mask"]),
    }  # fmt: skip
    for rung in range(2):
        draws = torch.cat([watch.theta[step - 1][rung::2] for step in looks])
        with run.bayesian.showing(draws), torch.no_grad():
            log_lik = run.bayesian.evaluate_batch(batch)[0]["member_log_lik"].double()
        mixed, single = -(log_lik.logsumexp(-1) - math.log(len(draws))).mean(), -log_lik.mean()
        rate = (single - mixed) / (1 - 1 / len(draws))  # of the part that falls with the number of members
        members = run.method.num_chains * run.method.draws_per_chain
        expected = mixed + rate * (1 / members - 1 / len(draws))
        assert found["ladder_nll"][rung] == pytest.approx(float(expected), rel=1e-6)  # float32 logits
    best = int(torch.tensor(found["ladder_nll"]).argmin())
    assert run.posterior.config.method["temperature"] == LADDER["temperature"][best]
    assert set(run.run.state.ladder_rung.tolist()) == {best}


@pytest.mark.parametrize("best", [0, 1])
def test_a_temperature_is_judged_by_all_chains_scaled_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, best: int
) -> None:
    """Check chains that find their own step size. The score is planted: another one chooses another rung."""
    asked: list[Tensor] = []

    def planted(self: Any, theta: Tensor, part: str, *, num_members: int | None) -> tuple[float, None]:
        assert num_members is not None
        assert 4 <= num_members <= 8
        asked.append(theta.clone())
        return (0.0 if len(asked) - 1 == best else 1.0), None

    monkeypatch.setattr("hf_bayes.objectives.model_objective.ModelObjective.heldout", planted)
    monkeypatch.setattr(ladder, "_is_better", lambda other, now: False)  # no review changes the choice
    watch, temperatures = Watch(), [1.0, 0.25]
    run = trainer(tmp_path, config(ladder={"temperature": temperatures}, **WARM), watch, learning_rate=None)
    run.train()
    assert len(asked) == 2  # one mixture for each rung, at one time
    origin = run.run.state.origin
    for rung, temperature in enumerate(temperatures):
        for chain in range(4):
            own = chain % 2
            away = math.sqrt(temperature / temperatures[own]) * (asked[own][chain] - origin[chain])
            torch.testing.assert_close(asked[rung][chain], origin[chain] + away)
    unscaled = torch.stack([asked[chain % 2][chain] for chain in range(4)])
    (choice,) = [step for step, theta in enumerate(watch.theta, 1) if torch.equal(theta, unscaled)]
    assert choice == 4 + 3 * ((run.active.problem.burn_in - 4) // 4)
    assert run.method.temperature == temperatures[best]


class Lose(Watch):
    """Put chain 1 far from where the model predicts anything, one update before the choice."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_step_end(args, state, control, **kwargs)
        run, burn_in = self.trainer.run, self.trainer.active.problem.burn_in
        if state.global_step == 4 + 3 * ((burn_in - 4) // 4) - 1:
            away = torch.zeros_like(run.state.theta)
            away[1] = 30 * torch.ones_like(away[1]).cumsum(0).cos()
            run.state = run.state._replace(theta=run.state.theta + away)


@pytest.mark.parametrize(("watch", "lost"), [(Lose(), [1]), (Watch(), [])], ids=["one is lost", "none is lost"])
def test_a_lost_chain_goes_back_to_its_warm_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, watch: Watch, lost: list[int]
) -> None:
    caplog.set_level(logging.INFO, "hf_bayes.training.trainer")
    asked: list[Tensor] = []

    def planted(self: Any, theta: Tensor, part: str, *, num_members: int | None) -> tuple[float, None]:
        asked.append(theta.clone())
        return 1.0, None

    monkeypatch.setattr("hf_bayes.objectives.model_objective.ModelObjective.heldout", planted)
    method = config(ladder={"temperature": [1.0, 0.25]}, **WARM)
    run = trainer(tmp_path, method, watch, learning_rate=None)
    run.train()
    for theta in asked:
        at_start = (theta == run.run.state.origin).all(1)
        assert at_start.nonzero()[:, 0].tolist() == lost
    report = run.posterior.config.diagnostics
    assert report["ladder_lost"] == [chain in lost for chain in range(4)]
    assert ("1 of 4 chains predicted badly at every T" in caplog.text) == bool(lost)


@pytest.mark.parametrize("best", [0, 1])
def test_the_rest_of_the_run_has_the_chosen_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, best: int
) -> None:
    """The held-out score is planted: another one chooses another rung."""
    asked = []

    def planted(self: Any, theta: Tensor, part: str, *, num_members: int | None) -> tuple[float, None]:
        asked.append((len(theta), part, num_members))
        return (0.0 if len(asked) - 1 == best else 1.0), None

    monkeypatch.setattr("hf_bayes.objectives.model_objective.ModelObjective.heldout", planted)
    run = trainer(tmp_path, config(), max_steps=120)
    run.train()
    assert asked == [(2 * ladder.NUM_LOOKS, "all", 4 * run.method.draws_per_chain)] * 2
    temperature, scale = (values[best] for values in LADDER.values())
    assert (run.method.temperature, run.method.prior_scale, run.method.ladder) == (temperature, scale, None)
    assert run.posterior.config.method == run.method.to_dict()
    law = run.posterior.config.diagnostics["kinetic_temperature_law"]
    assert law == pytest.approx(2 * temperature / 1.9, rel=0.05)  # beta = 0.9, and the learning rate falls


@pytest.mark.parametrize(("heating", "of_step"), [(0.1, 0.5), (None, 1.0)])
def test_a_chain_of_another_temperature_is_scaled_to_its_mode(
    tmp_path: Path, heating: float | None, of_step: float
) -> None:
    """h^2 is proportional to T and to the heating, whose default is four times as large below T = 1."""
    run = trainer(tmp_path, config(ladder=None, temperature=1.0, heating=heating), learning_rate=None)
    run.train()
    state, rule = run.run.state, run.run.method
    moved = rule.rescale(state, 0.25)
    assert torch.equal(moved.theta, state.origin + 0.5 * (state.theta - state.origin))
    assert torch.equal(moved.whitened_momentum, 0.5 * state.whitened_momentum)
    torch.testing.assert_close(moved.step_size, of_step * state.step_size)
    assert torch.equal(moved.root, state.root)
    hotter = rule.rescale(state, 1e4)
    assert torch.all(hotter.step_size == 0.2)  # the largest step that discretises well


def test_a_chain_that_restarts_has_the_step_of_its_start(tmp_path: Path) -> None:
    run = trainer(tmp_path, config(ladder=None, **WARM), learning_rate=None)
    run.train()
    state, rule = run.run.state, run.run.method
    noisier = state._replace(step_size=0.5 * state.step_size, path_variance=4 * state.path_variance)
    again = rule.restart(noisier, torch.tensor([False, True, False, False]))
    assert torch.equal(again.theta[1], state.origin[1])
    variance = state.choices[1, 2]
    allowed = 2 * 0.1 * 0.1  # heating 0.1, beta = 0.9
    assert float(again.step_size[1]) == pytest.approx(min(math.sqrt(allowed / float(variance)), 0.2), rel=1e-6)
    assert float(again.path_variance[1]) == float(variance)
    for name in ("theta", "step_size", "path_variance", "path_num_seen"):
        before, after = getattr(noisier, name), getattr(again, name)
        assert torch.equal(after[[0, 2, 3]], before[[0, 2, 3]])


def test_the_choice_scales_the_chains_of_other_temperatures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_rung, scaled = ladder._rung, []

    def watched(*args: Any) -> ladder.Rung:
        rung = make_rung(*args)

        def rescale(state: Any, ratio: float) -> Any:
            scaled.append((rung.temperature, len(state.theta), ratio))
            return rung.rule.rescale(state, ratio)

        return rung._replace(rule=rung.rule._replace(rescale=rescale))

    monkeypatch.setattr(ladder, "_rung", watched)
    run = trainer(tmp_path, config())
    run.train()
    chosen = run.method.temperature
    (other,) = {1.0, 0.01} - {chosen}
    assert scaled == [(other, 2, chosen / other)]


def test_a_run_resumes_on_both_sides_of_the_choice(tmp_path: Path) -> None:
    whole = trainer(tmp_path / "whole", config(**WARM), learning_rate=None)
    whole.train()
    settings = {"learning_rate": None, "save_strategy": "steps", "save_steps": 15}
    stopped = trainer(tmp_path / "stopped", config(**WARM), **settings)
    stopped.add_callback(StopAfter(15))
    stopped.train()
    for step in (15, 30):  # the first of these resumed runs saves checkpoint 30
        resumed = trainer(tmp_path / "stopped", config(**WARM), **settings)
        resumed.train(resume_from_checkpoint=str(tmp_path / "stopped" / f"checkpoint-{step}"))
        assert runs.equal(resumed.posterior.approximation, whole.posterior.approximation)
        assert resumed.method == whole.method


@pytest.mark.parametrize(
    ("ladder", "message"),
    [
        ({"temperature": [1.0]}, "at least 2 rungs to choose from, got 1"),
        ({"temperature": [1, 0.5, 0.3, 0.2, 0.1]}, "5 rungs needs a chain for each, got num_chains=4"),
        ({"temperature": [1, 0.5], "prior_scale": [1, 2, 3]}, "must have one length"),
        ({"momentum": [0.5, 0.9]}, "must map temperature or prior_scale to lists"),
        ({}, "must map temperature or prior_scale to lists"),
        ([1, 0.5], "must map temperature or prior_scale to lists"),
        ({"temperature": 0.5}, r"ladder\['temperature'\] must be a list of numbers, got 0.5"),
        ({"temperature": [1, 0]}, r"ladder\['temperature'\] must be a finite number > 0, got 0"),
        ({"prior_scale": [1, float("nan")]}, r"ladder\['prior_scale'\] must be a finite number > 0, got nan"),
    ],
)
def test_bad_ladders_are_refused(ladder: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SGHMCConfig(num_chains=4, ladder=ladder)


def test_a_ladder_replaces_its_settings_and_needs_a_sampler() -> None:
    with pytest.raises(ValueError, match=r"got temperature=0.5 as well"):
        config(temperature=0.5)
    with pytest.raises(ValueError, match=r"the ladder chooses prior_scale, got prior_scale=2.0 as well"):
        config(prior_scale=2.0)
    for name in (MAPConfig.name, LaplaceConfig.name):
        with pytest.raises(ValueError, match=f"{name} has no field 'ladder'"):
            from_dict({"name": name, "ladder": LADDER})
    assert from_dict(config().to_dict()) == config()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heldout": 199}, "needs at least 200, got 199: fewer could not tell settings apart"),
        ({"max_steps": 30}, "burn-in, which has 15 updates after the warm start, and 16 are needed"),
        (
            {"max_steps": 1200, "learning_rate": None, "method": config(**WARM, burn_in=30)},
            r"measure their noise until update 26, and the ladder looks at them from update 22",
        ),
    ],
)
def test_too_little_to_choose_by_is_refused_before_a_step(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path, **{"method": config(), **changes}).train()


def test_a_ladder_needs_heldout_rows(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="sghmc with ladder fits by the rows of eval_dataset, got None"):
        runs.trainer(tmp_path, config(), model=tiny_bert(), subspace="last_layer", train=runs.label_rows(40))
    with pytest.raises(ValueError, match="ladder of sghmc needs held-out rows, which sample does not have"):
        sample(lambda theta, batch: theta.square().sum(), torch.zeros(2), config(prior_std=None), num_steps=50,
               learning_rate=0.1, num_data=1)  # fmt: skip


def test_chains_in_several_processes_are_refused() -> None:
    """Two processes with two chains each: the check itself, because a launch takes long."""
    with pytest.raises(ValueError, match="compares its chains in one process, and they are spread over 2"):
        require_all_chains(config(), SimpleNamespace(chain_size=2))
    require_all_chains(config(), SimpleNamespace(chain_size=1))
    require_all_chains(config(ladder=None), SimpleNamespace(chain_size=2))


def test_an_inherited_posterior_cannot_be_scaled(tmp_path: Path) -> None:
    first = trainer(tmp_path / "first", LaplaceConfig(prior_std=1.0))
    first.train()
    first.save_model()
    run = runs.trainer(
        tmp_path / "second", config(prior_std=None), model=tiny_bert(), subspace="last_layer",
        train=runs.label_rows(40), eval_dataset=runs.label_rows(200, seed=7), prior=str(tmp_path / "first"),
        max_steps=STEPS,
    )  # fmt: skip
    with pytest.raises(ValueError, match="the prior is an inherited posterior, which a ladder of prior_scale cannot"):
        run.train()


def test_estimates_of_a_preconditioner_are_no_moves(tmp_path: Path) -> None:
    masses = {"preconditioner": "layerwise", "preconditioner_batches": 2}
    run = trainer(tmp_path, config(**masses))
    run.train()
    assert run.monitor.totals["unmoved"].tolist() == [0.0] * 4
    moves = STEPS - 4 * 2  # four cycles, two updates of each an estimate
    assert run.monitor.totals["rates"].tolist() == pytest.approx([moves * 1e-2] * 4)
