from __future__ import annotations

import logging
import warnings

import pytest
import torch
from datasets import Dataset

from hf_bayes import BayesianModelForCausalLM, EnsembleConfig, IVONConfig, LaplaceConfig, MeanFieldConfig, Posterior
from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from tests import runs
from tests.tiny_models import tiny_bert, tiny_llama, with_lora
from tests.training.trained import StopAfter


def test_posterior_before_training_is_refused(tmp_path):
    trainer = runs.trainer(tmp_path, SGHMCConfig(num_chains=2))
    with pytest.raises(ValueError, match=r"call train\(\) first"):
        trainer.save_model()


def test_metrics_of_several_eval_sets_are_kept_by_name(tmp_path):
    sets = {name: Dataset.from_list(runs.token_rows(3, seed=seed)) for seed, name in enumerate(("near", "far"))}
    trainer = runs.trainer(tmp_path, SGHMCConfig(num_chains=2, warm_start_steps=2), eval_dataset=sets)
    trainer.train()
    trainer.save_model()
    kept = trainer.posterior.config.metrics
    assert {"near_nll", "far_nll", "near_map_nll", "far_map_nll", "far_epistemic"} <= kept.keys()


@pytest.mark.parametrize("reason", ["no row", "no labels", "all ignored", "no full batch"])
@pytest.mark.parametrize("several", [False, True])
def test_held_out_rows_without_a_term_lose_no_posterior(tmp_path, caplog, reason, several):
    rows = runs.label_rows(4, seed=1)
    unlabelled = [{name: value for name, value in row.items() if name != "label"} for row in rows]
    empty = {
        "no row": Dataset.from_list(rows).select([]),
        "no labels": Dataset.from_list(unlabelled),
        "all ignored": Dataset.from_list([{**row, "label": -100} for row in rows]),
        "no full batch": Dataset.from_list(rows[:2]),
    }[reason]
    trainer = runs.trainer(
        tmp_path,
        SGHMCConfig(num_chains=2, warm_start_steps=2),
        model=with_lora(tiny_bert()),
        train=runs.label_rows(8),
        eval_dataset={"near": Dataset.from_list(rows), "far": empty} if several else empty,
        eval_strategy="steps",
        eval_steps=3,
        dataloader_drop_last=reason == "no full batch",
    )
    trainer.train()
    trainer.save_model()
    assert f"no likelihood term in eval_dataset{' ' + repr('far') if several else ''}, so" in caplog.text
    assert runs.equal(Posterior.from_pretrained(tmp_path).approximation, trainer.posterior.approximation)
    kept = trainer.posterior.config.metrics
    assert not any(name.startswith("far_") for name in kept)
    assert {"near_nll", "near_map_nll"} <= kept.keys() if several else not kept


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
