from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from transformers import default_data_collator

from hf_bayes.core.config import MethodConfig
from hf_bayes.core.types import Evaluation
from hf_bayes.methods.averaging.ensemble import EnsembleConfig
from hf_bayes.methods.registry import METHODS
from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from hf_bayes.training import adamw_estimate
from hf_bayes.training.map_comparison import compare, map_of_run
from hf_bayes.training.trainer_host import TrainerHost
from tests import runs
from tests.methods import ladder_runs
from tests.training.trained import StopAfter


def test_metrics_at_save_set_the_posterior_beside_a_map_estimate(tmp_path):
    rows = runs.token_rows(4, seed=1)
    trainer = runs.trainer(tmp_path, SGHMCConfig(num_chains=2), eval_dataset=rows)
    trainer.train()
    trainer.save_model()
    kept = trainer.posterior.config.metrics
    assert kept["nll"] == trainer.evaluate()["eval_nll"]  # and the posterior is what is shown afterwards
    point = map_of_run(trainer.posterior, trainer.active)
    with torch.no_grad():
        trainer.bayesian.show(point)
        batch = default_data_collator(rows)
        assert kept["map_nll"] == pytest.approx(float(trainer.bayesian(**batch).loss), rel=1e-5)


@pytest.mark.parametrize(
    ("name", "polished"),
    [("map", False), ("ensemble", False), ("laplace", False), ("sgd_mc", True), ("swa", True), ("swag", True)],
)
def test_sgd_iterates_are_no_map_estimate_until_polished(tmp_path, name, polished):
    trainer = runs.trainer(tmp_path, METHODS[name](burn_in=0.5), max_steps=40)
    trainer.train()
    posterior = trainer.posterior
    assert torch.equal(map_of_run(posterior, trainer.active)[0], posterior.representative) is not polished


@pytest.mark.parametrize(
    ("name", "fields", "changes", "weight"),
    [
        ("sghmc", {}, {}, 1.0),
        ("sghmc", {"temper": "likelihood", "temperature": 3.0}, {}, 3.0),
        ("mean_field", {"temper": "likelihood", "temperature": 0.5}, {}, 0.5),
        ("penalty", {"batch_posterior": True}, {"gradient_accumulation_steps": 3}, 5.0),  # T = N / n
    ],
)
def test_a_map_estimate_is_of_the_energy_of_the_run(tmp_path, monkeypatch, name, fields, changes, weight):
    trainer = runs.trainer(tmp_path, METHODS[name](num_chains=2, **fields), **changes)
    trainer.train()
    rule, problem = _given_to_map_estimate(trainer, monkeypatch)
    state = rule.init(trainer.bayesian.theta.detach()[:1], ())
    _, info = rule.update(state, Evaluation(torch.zeros(1), torch.zeros_like(state.theta)), 0.1, ())
    torch.testing.assert_close(info["energy"], -weight * problem.prior.log_prob(state.theta))


def test_a_map_estimate_has_the_prior_of_the_chosen_rung(tmp_path, monkeypatch):
    run = ladder_runs.trainer(tmp_path, ladder_runs.config(ladder={"prior_scale": [0.5, 0.25]}))
    run.train()
    _, problem = _given_to_map_estimate(run, monkeypatch)
    torch.testing.assert_close(problem.prior.std, run.method.prior_scale * run.active.prior.std.to(problem.prior.std))
    assert run.method.prior_scale < 1


def _given_to_map_estimate(trainer, monkeypatch):
    """Return the rule and the problem that the comparison optimises with."""
    given = []
    monkeypatch.setattr(adamw_estimate, "map_estimate", lambda *args, **_: given.append(args))
    map_of_run(trainer.posterior, trainer.active)
    rule, _, _, problem, _ = given[0]
    return rule, problem


def test_after_an_early_stop_it_is_as_long_as_that_run(tmp_path, monkeypatch):
    given = []
    monkeypatch.setattr(adamw_estimate, "map_estimate", lambda *_, num_updates, **__: given.append(num_updates))
    for planned in (1000, 20):
        run = runs.trainer(tmp_path, SGHMCConfig(num_chains=2), max_steps=planned, callbacks=[StopAfter(20)])
        run.train()
        map_of_run(run.posterior, run.active)
    assert given == [4, 4]  # a tenth of the gradients of 20 updates of 2 chains


@pytest.mark.parametrize("name", ["sghmc", "map"])
def test_a_map_estimate_may_be_left_out(tmp_path, name):
    trainer = runs.trainer(tmp_path, METHODS[name](), eval_dataset=runs.token_rows(4), map_updates=0)
    trainer.train()
    trainer.save_model()
    assert "map_nll" not in trainer.posterior.config.metrics


def test_a_posterior_worse_than_its_map_estimate_is_said(tmp_path, caplog):
    trainer = runs.trainer(tmp_path, SGHMCConfig(num_chains=2), eval_dataset=runs.token_rows(4))
    compare(TrainerHost(trainer), "", 2.0, 1.5, 0.1, method=trainer.method)
    assert "worse than a MAP estimate's 1.5000" in caplog.text
    caplog.clear()
    compare(TrainerHost(trainer), "", 1.5, 2.0, 0.1, method=trainer.method)
    assert not caplog.records


@pytest.mark.parametrize(
    ("method", "advice"),
    [
        (EnsembleConfig(), "train longer, or use the MAP estimate"),
        (METHODS["mean_field"](), "train longer, lower the temperature, or use the MAP estimate"),
        (SGHMCConfig(), "train longer, lower the temperature (a ladder chooses it: docs/automatic.md), or use"),
        (SGHMCConfig(temperature=0), "train longer, or use the MAP estimate"),
        (SGHMCConfig(ladder={"temperature": [1, 0.1]}), "train longer, give the ladder lower temperatures"),
        (SGHMCConfig(ladder={"prior_scale": [1, 2]}), "train longer, lower the temperature (a ladder"),
    ],
)
def test_advice_on_a_worse_posterior_fits_the_method(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, method: MethodConfig, advice: str
) -> None:
    trainer = runs.trainer(tmp_path, SGHMCConfig(num_chains=2))
    compare(TrainerHost(trainer), "", 2.0, 1.5, 0.1, method=method)
    assert advice in caplog.text


@pytest.mark.parametrize(
    ("nll", "error", "said", "warned"),
    [
        (1.65, 0.1, False, False),
        (1.65, 0.05, True, True),
        (1.35, 0.05, True, False),
        (1.35, 0.1, False, False),
        (2.0, None, False, False),
        (1.50004, 1e-7, False, False),  # both are shown as 1.5000
    ],
)
def test_a_difference_within_two_standard_errors_is_not_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, nll: float, error: float | None, said: bool, warned: bool
) -> None:
    trainer = runs.trainer(tmp_path, SGHMCConfig(num_chains=2))
    caplog.set_level(logging.INFO, "hf_bayes.training.trainer")
    compare(TrainerHost(trainer), "", nll, 1.5, error, method=trainer.method)
    assert ("MAP estimate" in caplog.text) == said
    assert any(record.levelname == "WARNING" for record in caplog.records) == warned
    assert f"{nll:.4f}" in caplog.text  # the figure of the posterior is always given
