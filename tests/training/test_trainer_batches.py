"""The batches of an update of HMC and of the noise penalty in ``BayesianTrainer``."""

from __future__ import annotations

import pytest
from datasets import Dataset

from hf_bayes.methods.registry import METHODS
from hf_bayes.training.trainer import BayesianTrainer
from tests import runs
from tests.tiny_models import tiny_llama, with_lora


def test_exact_kernels_see_all_data_in_every_move(tmp_path):
    trainer = runs.trainer(
        tmp_path,
        METHODS["hmc"](num_chains=2, num_leapfrog=2),
        max_steps=-1,
        num_train_epochs=4,
        gradient_accumulation_steps=3,
    )
    assert trainer.train().global_step == 4
    assert trainer.args.gradient_accumulation_steps == 5  # 10 rows, 2 at a time


def test_an_exact_kernel_leaves_the_arguments_as_they_were(tmp_path):
    args = runs.arguments(tmp_path, gradient_accumulation_steps=2)

    def trainer(name):
        model, rows = with_lora(tiny_llama()), Dataset.from_list(runs.token_rows())
        return BayesianTrainer(model, METHODS[name](num_chains=2), args, train_dataset=rows)

    exact, noisy = trainer("hmc"), trainer("sghmc")
    assert exact.args.gradient_accumulation_steps == 5  # what transformers reads: 10 rows, 2 at a time
    assert args.gradient_accumulation_steps == 2
    assert noisy.rows.rows_per_update == 4


def test_batch_posterior_is_saved_as_a_tempered_likelihood(tmp_path):
    config = METHODS["penalty"](num_chains=2, batch_posterior=True)
    trainer = runs.trainer(tmp_path, config, gradient_accumulation_steps=3)
    trainer.train()
    method = trainer.posterior.config.method
    assert (method["temperature"], method["temper"], method["batch_posterior"]) == (5.0, "likelihood", False)  # 10 / 2


@pytest.mark.parametrize(
    ("fields", "changes", "message"),
    [
        ({}, {}, "penalty needs at least 2 batches per update to estimate their variance, got 1"),
        ({"num_leapfrog": 1}, {"gradient_accumulation_steps": 2}, "penalty needs at least 3 batches per update"),
        ({"replacement": False}, {"gradient_accumulation_steps": 6}, "cannot draw 12 different rows of 10"),
    ],
)
def test_incomparable_batches_are_refused_before_training(tmp_path, fields, changes, message):
    with pytest.raises(ValueError, match=message):
        runs.trainer(tmp_path, METHODS["penalty"](num_chains=2, **fields), **changes)


@pytest.mark.parametrize(("replacement", "factor"), [(True, 1.0), (False, 0.4)])
def test_rows_drawn_once_get_a_finite_population_factor(tmp_path, replacement, factor):
    config = METHODS["penalty"](num_chains=2, replacement=replacement)
    trainer = runs.trainer(tmp_path, config, gradient_accumulation_steps=3, max_steps=2)
    trainer.train()
    (entry, *_) = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert entry["finite_population_factor/chain_1"] == pytest.approx(factor)  # 6 of 10 rows
    assert entry["penalty/chain_1"] > 0
