"""Runs without a learning rate."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

from hf_bayes.core.schedules import Linear
from hf_bayes.methods.averaging.ensemble import EnsembleConfig
from hf_bayes.methods.averaging.map import MAPConfig
from hf_bayes.methods.mcmc.hmc import HMCConfig
from hf_bayes.methods.recommended import LEAST_UPDATES
from hf_bayes.methods.sgmcmc.agps import AGPSConfig
from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from hf_bayes.methods.sgmcmc.sgld import SGLDConfig
from hf_bayes.methods.variational.mean_field import MeanFieldConfig
from hf_bayes.objectives import range_test, starting
from hf_bayes.objectives.range_test import TrialPlan, trial_around
from hf_bayes.posteriors.posterior import Posterior
from hf_bayes.training.active_run import ActiveRun
from hf_bayes.training.arguments import BayesianTrainingArguments
from hf_bayes.training.reports import own_choices
from tests import runs
from tests.tiny_models import tiny_bert, tiny_llama, with_lora

PLAN = trial_around(0.134, 8)


def trainer(directory: Path, method: Any, **changes: Any) -> Any:
    return runs.trainer(directory, method, **{"learning_rate": None, "max_steps": 32, **changes})


@pytest.fixture
def always_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial of eight updates, however short the run is."""
    monkeypatch.setattr(range_test, "plan_trial", lambda gradients: PLAN)


def test_no_learning_rate_is_the_default(tmp_path: Path) -> None:
    assert BayesianTrainingArguments(str(tmp_path)).learning_rate is None


def test_a_sampler_finds_its_settings_and_saves_them(
    tmp_path: Path, always_tries: None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "hf_bayes.training.trainer")
    run = trainer(tmp_path, SGHMCConfig(num_chains=2, draws_per_chain=2, prior_std=0.1))
    run.train()
    run.save_model()
    assert "warm start by AdamW: learning rate" in caplog.text
    assert f"from a trial of {len(PLAN.rates)} rates over 8 updates" in caplog.text
    assert "chains start at a draw of the Gaussian approximation: on the way" in caplog.text
    assert "sghmc: step size" in caplog.text
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a run of 32 updates has not converged
        saved = Posterior.from_pretrained(tmp_path).config.method
    assert (saved["warm_start_steps"], saved["burn_in"]) == (16, 21)
    assert saved["warm_start_learning_rate"] == run.active.settings.trial.learning_rate
    assert run.adamw_learning_rate == saved["warm_start_learning_rate"]
    assert bool((run.run.state.step_size > 0).all())
    assert bool(torch.stack(run.run.draws).isfinite().all())


@pytest.mark.parametrize("method", [MAPConfig(), EnsembleConfig(num_chains=2), MeanFieldConfig(num_chains=2)])
def test_an_optimiser_runs_at_the_rate_it_found(tmp_path: Path, always_tries: None, method: Any) -> None:
    run = trainer(tmp_path, dataclasses.replace(method, prior_std=0.1))
    run.train()
    found = run.active.settings.trial.learning_rate
    assert found in [pytest.approx(rate * (8 / 32) ** 0.5) for rate in PLAN.rates]
    rates = [log["learning_rate"] for log in run.state.log_history if "learning_rate" in log]
    assert rates == pytest.approx([found * (1 - step / 32) for step in range(32)], abs=1e-12)
    assert run.method.schedule == Linear()
    assert run.adamw_learning_rate == found


def test_a_rate_that_overflows_the_model_only_loses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for other in (3e-3, 1e30):
        plan = TrialPlan((1e-3, other), 1e-3, 8)
        monkeypatch.setattr(range_test, "plan_trial", lambda gradients, plan=plan: plan)
        run = trainer(tmp_path, MAPConfig(prior_std=0.1))
        run.train()
        found.append(run.active.settings.trial)
    assert math.isnan(found[1].losses[1e30])
    assert found[1].losses[1e-3] == pytest.approx(found[0].losses[1e-3], rel=1e-6)  # one rounding of float32
    assert found[1].learning_rate == 1e-3 * (8 / 32) ** 0.5


def test_a_trial_without_a_finite_rate_ends_in_its_own_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(range_test, "plan_trial", lambda gradients: TrialPlan((1e30, 1e32), 1e30, 8))
    with pytest.raises(FloatingPointError, match=r"at every learning rate .* in step 2\. No learning rate was given"):
        trainer(tmp_path, MAPConfig(prior_std=0.1)).train()


def test_a_method_without_a_rate_makes_its_stated_warm_start(tmp_path: Path) -> None:
    method = AGPSConfig(num_chains=2, max_std=0.1, warm_start_learning_rate=0.01, burn_in=10)
    run = trainer(tmp_path, method, max_steps=12)
    run.train()
    assert run.method.warm_start_steps == 10
    assert run.run.state.warm_step.tolist() == [10, 10]
    assert run.adamw_learning_rate == 0.01


def test_a_schedule_of_trainers_replaces_the_linear_one(tmp_path: Path, always_tries: None) -> None:
    run = trainer(tmp_path, MAPConfig(prior_std=0.1), lr_scheduler_type="cosine", max_steps=8)
    run.train()
    assert run.method.schedule is None
    found = run.active.settings.trial.learning_rate
    rates = [log["learning_rate"] for log in run.state.log_history if "learning_rate" in log]
    assert rates == pytest.approx([found * (1 + math.cos(math.pi * step / 8)) / 2 for step in range(8)])


@pytest.mark.parametrize("method", [SGHMCConfig(num_chains=2), MAPConfig()], ids=lambda method: method.name)
def test_a_resumed_run_keeps_the_rate_and_tries_nothing(
    tmp_path: Path, always_tries: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, method: Any
) -> None:
    caplog.set_level(logging.INFO, "hf_bayes.training.trainer")
    whole = trainer(tmp_path, method, save_strategy="steps", save_steps=4)
    whole.train()
    found = whole.active.settings.trial.learning_rate
    assert "from a trial of" in caplog.text

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a resumed run tries no rates")

    monkeypatch.setattr(starting, "range_test", refuse)
    for cut in (4, 12, 28):  # before the curvature pass of the sampler, and after it
        caplog.clear()
        again = trainer(tmp_path / "again", method)
        again.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{cut}"))
        assert all(torch.equal(a, b) for a, b in zip(whole.run.draws, again.run.draws, strict=True))
        assert f": learning rate {found:.2g}, which was found when the run began" in caplog.text
        assert "too short to try" not in caplog.text
    settings = json.loads((tmp_path / "checkpoint-4" / "chains" / "settings.json").read_text())
    assert settings["learning_rate"] is None
    assert settings["found_rate"] == found


@pytest.mark.parametrize("fault", ["mistyped", "damaged"])
def test_a_checkpoint_is_checked_before_a_rate_is_tried(
    tmp_path: Path, always_tries: None, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    trainer(tmp_path, MAPConfig(), save_strategy="steps", save_steps=16, map_updates=0).train()
    file = tmp_path / "checkpoint-16" / "chains" / "settings.json"
    file.write_text(file.read_text().replace("found_rate", "fond_rate"))

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("rates are tried before the checkpoint is checked")

    monkeypatch.setattr(starting, "range_test", refuse)
    name = {"mistyped": "checkpoint-61", "damaged": "checkpoint-16"}[fault]
    with pytest.raises((OSError, ValueError), match=f"{name}.*(lacks|settings.json)"):
        trainer(tmp_path / "again", MAPConfig()).train(resume_from_checkpoint=str(tmp_path / name))


@pytest.mark.parametrize("warm_start_steps", [0, 6])
def test_chains_do_not_depend_on_how_an_update_is_cut(tmp_path: Path, warm_start_steps: int) -> None:
    method = SGHMCConfig(num_chains=2, prior_std=0.5, warm_start_steps=warm_start_steps, warm_start_learning_rate=0.01)
    draws = []
    for batch, accumulation in ((4, 1), (1, 4)):
        changes = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation}
        model = with_lora(tiny_llama(dtype=torch.float64))
        run = trainer(tmp_path / str(batch), method, model=model, train=runs.token_rows(40), max_steps=24, **changes)
        run.train()
        draws.append(torch.stack(run.run.draws))
    torch.testing.assert_close(draws[1], draws[0], rtol=1e-9, atol=1e-9)  # sums in float64, in another order


def test_a_sampler_measures_before_it_moves(tmp_path: Path) -> None:
    run = trainer(tmp_path, SGHMCConfig(num_chains=2, warm_start_steps=4, warm_start_learning_rate=0.01))
    run.train()
    logs = {int(log["step"]): log for log in run.state.log_history if "relaxation/chain_0" in log}
    assert min(logs) == 9  # four updates of AdamW, four minibatches for the noise, the first update that samples
    assert "gradient_variance/chain_0" in logs[9]
    assert not any("gradient_variance/chain_0" in log for step, log in logs.items() if step != 9)
    assert not any("learning_rate" in log for log in logs.values())  # it would be 1
    rates = {int(log["step"]): log["learning_rate"] for log in run.state.log_history if "learning_rate" in log}
    assert rates == {step: pytest.approx(0.01 * (1 - (step - 1) / 4)) for step in (1, 2, 3, 4)}  # of AdamW
    for log in logs.values():
        assert log["relaxation/chain_0"] == pytest.approx(0.1 / log["step_size/chain_0"] ** 2, rel=1e-4)


def test_a_run_whose_noise_has_grown_tells_its_last_step_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "hf_bayes.training.trainer")
    method = SGHMCConfig(num_chains=2, warm_start_steps=4, warm_start_learning_rate=0.01)
    for notable in (1e6, 0.0):
        monkeypatch.setattr(own_choices, "NOTABLE_GROWTH", notable)
        caplog.clear()
        run = trainer(tmp_path, method)
        run.train()
        found = re.findall(r"grew, to (\S+) times .* step size fell to (\S+), and .* up to (\d+) updates", caplog.text)
        assert len(found) == (notable == 0)
    growth, step_size, relaxation = map(float, found[0])
    state = run.run.state
    assert growth > 0
    assert step_size == pytest.approx(float(state.step_size.mean()), rel=0.05)  # printed with two digits
    assert relaxation == pytest.approx(float((0.1 / state.step_size**2).max()), abs=0.5)


def test_a_run_too_short_to_forget_its_start_is_warned(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    method = SGHMCConfig(num_chains=2, heating=1e-6, prior_std=0.1)
    run = trainer(tmp_path, method)
    run.train()
    (found,) = re.findall(
        r"is too short. .* forgets its past in (\d+) updates.*; the (\d+) updates after burn-in are worth (\S+) "
        r"independent draws of a chain. .* One independent draw takes a run of (\d+) updates",
        caplog.text,
    )
    relaxation, left, worth, needed = map(float, found)
    assert worth == pytest.approx(left / relaxation, rel=0.05)  # printed with two digits
    assert needed == pytest.approx(run.run.problem.num_steps * relaxation / left, rel=0.01)


def test_choices_are_told_for_the_chains_of_all_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "hf_bayes.training.trainer")
    gather = ActiveRun.of_all_chains

    def with_others(self: ActiveRun, info: dict[str, Any]) -> dict[str, Any]:
        if "loss" in info or "gradient_variance" not in info:
            return gather(self, info)
        others = {"trial_fits": 0.0, "relaxation": 1e6}
        return {name: torch.cat([value, 0 * value + others.get(name, 1.0)]) for name, value in info.items()}

    monkeypatch.setattr(ActiveRun, "of_all_chains", with_others)
    trainer(tmp_path, SGHMCConfig(num_chains=2, prior_std=0.1)).train()
    assert re.search(r"\d of 4 chains start at a draw", caplog.text)
    assert "is too short. A chain forgets its past in 1000000 updates" in caplog.text


def test_a_run_below_the_shortest_relaxation_is_refused(tmp_path: Path) -> None:
    """SGLD has no momentum, so h = 0.2 at most gives 25 updates; of 68, a warm start of 34 and 10 more are burn-in."""
    message = r"forgets its past in 25 updates at best, and the 24 updates after burn-in pay 0.96 of that.* least 25"
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path / "short", SGLDConfig(num_chains=2), max_steps=68).train()
    trainer(tmp_path / "long", SGLDConfig(num_chains=2), max_steps=69).train()


def test_classifiers_find_a_step_size_by_kronecker_factors(tmp_path: Path) -> None:
    run = trainer(
        tmp_path, SGHMCConfig(num_chains=2, prior_std=0.3), model=with_lora(tiny_bert()), train=runs.label_rows(12)
    )
    run.train()
    assert run.run.state.root.shape[1] > run.bayesian.layout.dim  # bases, too
    assert bool(run.run.state.theta.isfinite().all())


def test_what_cannot_find_a_rate_is_refused_before_a_step(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="hmc with these settings needs a learning_rate, got None"):
        trainer(tmp_path, HMCConfig(num_chains=2)).train()


def test_a_stream_cannot_be_passed_over_by_number(tmp_path: Path) -> None:
    stream = Dataset.from_list(runs.token_rows(10)).to_iterable_dataset()
    run = trainer(
        tmp_path,
        SGHMCConfig(num_chains=2, warm_start_learning_rate=0.01),
        train=stream,
        num_data=70,
        minibatch="shared",
    )
    with pytest.raises(ValueError, match=r"a pass over rows by number, and there are none .*: give learning_rate"):
        run.train()


def test_a_trial_never_touches_the_chains(tmp_path: Path, always_tries: None) -> None:
    run = trainer(tmp_path, MAPConfig(num_chains=2, init_jitter=0.1))
    before = run.bayesian.theta.detach().clone()
    started = runs.started(run)
    assert torch.equal(started.run.theta, before)


@pytest.mark.parametrize(("coldest", "level"), [(0.1, logging.INFO), (2.0, logging.WARNING)])
def test_a_tempered_ladder_is_not_warned_of_its_draws(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, coldest: float, level: int
) -> None:
    """Rows that chose a T below 1 chose predictions, so chains that have not converged are no fault."""
    caplog.set_level(logging.INFO, "hf_bayes.training.trainer")
    ladder = {"temperature": [coldest, 1.5 * coldest]}
    method = SGHMCConfig(num_chains=4, draws_per_chain=4, ladder=ladder, warm_start_learning_rate=0.01)
    given = {"model": tiny_bert(), "subspace": "last_layer", "train": runs.label_rows(40)}
    run = trainer(tmp_path, method, **given, eval_dataset=runs.label_rows(200, seed=1), max_steps=LEAST_UPDATES)
    run.train()
    relaxation = r"forgets its past in (\d+) \(the hottest\) to (\d+) updates \(the coldest\), and (\d+) updates follow"
    ((hottest, longest, left),) = re.findall(relaxation, caplog.text)
    assert 0 < int(hottest) <= int(longest)
    assert int(left) == run.active.problem.num_steps - run.active.problem.burn_in
    assert "is too short" not in caplog.text
    found = run.posterior.config.diagnostics
    (told,) = [record for record in caplog.records if found["verdict"] in record.getMessage()]
    assert told.levelno == level
    assert found["converged"] is (None if coldest < 1 else False)
    assert found["chosen_temperature"] == (run.method.temperature if coldest < 1 else None)


def test_a_ladder_reads_a_part_of_many_held_out_rows(tmp_path: Path) -> None:
    given = {"model": tiny_bert(), "subspace": "last_layer", "train": runs.label_rows(40)}
    run = trainer(tmp_path, None, **given, eval_dataset=runs.label_rows(601, seed=1), max_steps=LEAST_UPDATES)
    data = runs.started(run).run.objective.data
    assert data is not None
    assert data.num_heldout == 600
