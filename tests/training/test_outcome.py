from __future__ import annotations

import logging
import warnings

import pytest
import torch

from hf_bayes import BayesianModelForCausalLM, EnsembleConfig, IVONConfig, LaplaceConfig, MeanFieldConfig, Posterior
from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from tests import runs
from tests.tiny_models import tiny_llama
from tests.training.trained import StopAfter


def test_posterior_before_training_is_refused(tmp_path):
    trainer = runs.trainer(tmp_path, SGHMCConfig(num_chains=2))
    with pytest.raises(ValueError, match=r"call train\(\) first"):
        trainer.save_model()


@pytest.mark.parametrize(
    ("method", "updates", "draws"),
    [
        (SGHMCConfig(num_chains=2, draws_per_chain=2), 2, 0),
        (SGHMCConfig(num_chains=2, draws_per_chain=2), 5, 1),
        (EnsembleConfig(num_chains=2), 2, 0),
    ],
)
def test_a_stopped_run_records_how_far_it_came(tmp_path, caplog, method, updates, draws):
    caplog.set_level(logging.INFO, "hf_bayes.training.trainer")
    run = runs.trainer(tmp_path, method, callbacks=[StopAfter(updates)])
    run.train()
    run.save_model()
    found = run.posterior.config.diagnostics
    names = ("stopped_at", "num_planned_updates", "num_draws_before_stop")
    assert [found[name] for name in names] == [updates, 6, draws]
    told = f"training stopped at update {updates} of 6, " + ("after 1 of 2 draws" if draws else "before the first draw")
    (record,) = [record for record in caplog.records if told in record.getMessage()]
    burned = method.temperature > 0 and draws == 0
    assert record.levelno == (logging.WARNING if burned else logging.INFO)
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        Posterior.from_pretrained(tmp_path)
    words = "did not converge: stopped at update 2 of 6, before sampling: these are no draws of the posterior"
    assert any(words in str(warning.message) for warning in given) is burned


@pytest.mark.parametrize("method", [LaplaceConfig(), MeanFieldConfig(), IVONConfig()], ids=lambda method: method.name)
def test_a_gaussian_of_a_stopped_run_is_no_state_of_a_chain(tmp_path, caplog, method):
    caplog.set_level(logging.INFO, "hf_bayes.training.trainer")
    runs.trainer(tmp_path, method, callbacks=[StopAfter(2)]).train()
    (record,) = [record for record in caplog.records if "training stopped at update 2 of 6" in record.getMessage()]
    assert record.levelno == logging.INFO
    assert record.getMessage().endswith("and the Gaussian is fitted there")


def test_a_whole_run_records_no_stop(tmp_path):
    run = runs.trainer(tmp_path, SGHMCConfig(num_chains=2))
    run.train()
    assert run.posterior.config.diagnostics["stopped_at"] is None


def test_saving_after_an_evaluation_does_not_evaluate_again(tmp_path, monkeypatch):
    trainer = runs.trainer(tmp_path, SGHMCConfig(num_chains=2), eval_dataset=runs.token_rows(4), map_updates=0)
    trainer.train()
    trainer.evaluate()
    monkeypatch.setattr(trainer.bayesian, "evaluate_batch", None)
    trainer.save_model()
    assert trainer.posterior.config.metrics["nll"] > 0


def test_a_gaussian_run_predicts_with_the_members_that_load(tmp_path):
    run = runs.trainer(tmp_path, MeanFieldConfig(), max_steps=2)
    run.train()
    run.save_model()
    loaded = BayesianModelForCausalLM.from_pretrained(tmp_path, base_model=tiny_llama())
    assert torch.equal(run.bayesian.current.cpu(), loaded.theta.detach())
    assert len(loaded.theta) == 10


@pytest.mark.parametrize("change", ["show", "train"])
def test_metrics_are_those_of_the_posterior_that_is_saved(tmp_path, change):
    """Another trainer may train the same model, or the user may show other members."""
    rows = {"eval_dataset": runs.token_rows(6), "map_updates": 0, "calibrate": False}
    run = runs.trainer(tmp_path / "run", SGHMCConfig(num_chains=2, draws_per_chain=2), **rows)
    run.train()
    expected = run.evaluate()["eval_nll"]
    run.outcome.heldout = None  # as if it had not been evaluated
    if change == "train":
        other = runs.trainer(tmp_path / "other", EnsembleConfig(num_chains=3), model=run.model, max_steps=9, **rows)
        other.train()
    else:
        run.bayesian.show(torch.zeros(1, run.bayesian.layout.dim))
    shown = run.bayesian.current.clone()
    run.save_model()
    assert Posterior.from_pretrained(tmp_path / "run").config.metrics["nll"] == expected
    assert run.evaluate()["eval_nll"] == expected
    assert torch.equal(run.bayesian.current, shown)  # what the user shows stays


def test_members_per_pass_may_be_set_after_a_run(tmp_path):
    run = runs.trainer(tmp_path, SGHMCConfig(num_chains=2), map_updates=0)
    run.train()
    run.bayesian.members_per_pass = 1
    with run.outcome.predicting():
        assert run.bayesian.members_per_pass == 1
    assert run.bayesian.members_per_pass == 1
