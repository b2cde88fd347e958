from __future__ import annotations

from functools import partial
from itertools import islice
from pathlib import Path

import pytest
import torch
from transformers import default_data_collator

from hf_bayes import LaplaceConfig, SGHMCConfig, attach
from hf_bayes.core.likelihood_facts import LikelihoodFacts
from hf_bayes.core.rng import MirroredGenerator
from hf_bayes.fit.finished_models import batches_by_number
from hf_bayes.models.to_posterior import to_posterior
from hf_bayes.objectives.data_access import DataAccess
from hf_bayes.objectives.data_scale import DataScale
from hf_bayes.objectives.starting import problem_for, start_run
from hf_bayes.posteriors.posterior import Posterior
from tests import runs
from tests.tiny_models import tiny_bert, tiny_llama, with_lora


def test_a_loop_without_a_trainer_runs_the_trainers_chains(tmp_path: Path) -> None:
    rows, method = runs.token_rows(10), SGHMCConfig(num_chains=2, draws_per_chain=2, prior_std=0.1)
    trainer = runs.trainer(tmp_path, method, train=rows, minibatch="shared", max_steps=6)
    trainer.train()

    model = attach(with_lora(tiny_llama()))
    terms = sum(len(row["input_ids"]) - 1 for row in rows)
    scale = DataScale(num_data=terms, num_rows=10, num_terms=terms, rows_per_update=2)
    run, *_ = start_run(model, method, scale, num_steps=6, learning_rate=1e-2, seed=trainer.args.seed)
    for batches in islice(trainer.rows.shared_updates(), 6):
        run.update(batches, learning_rate=1e-2)
    assert torch.equal(run.theta, trainer.run.theta)
    posterior = to_posterior(
        model, run.finish().approximation, method, subspace="trainable", num_data=terms, data_unit="token",
        tokenizer=None, seed=0, diagnostics={"converged": None, "verdict": "not assessed"},
    )  # fmt: skip
    posterior.save_pretrained(tmp_path / "posterior")
    assert Posterior.from_pretrained(tmp_path / "posterior").config.num_members == 4


def test_a_loop_without_a_trainer_makes_the_last_pass(tmp_path: Path) -> None:
    rows, method = runs.token_rows(10), LaplaceConfig(prior_std=0.1)
    trainer = runs.trainer(tmp_path, method, train=rows, minibatch="shared", max_steps=6)
    trainer.train()

    model = attach(with_lora(tiny_llama()))
    terms = sum(len(row["input_ids"]) - 1 for row in rows)
    scale = DataScale(num_data=terms, num_rows=10, num_terms=terms, rows_per_update=2)
    given = {"num_steps": 6, "learning_rate": 1e-2, "seed": trainer.args.seed}
    with pytest.raises(ValueError, match=r"laplace passes over rows by number, got no data=: give a DataAccess"):
        start_run(model, method, scale, **given)
    data = DataAccess(trainer.rows.by_number, 10)
    run, *_ = start_run(model, method, scale, data=data, **given)
    for batches in islice(trainer.rows.shared_updates(), 6):
        run.update(batches, learning_rate=1e-2)
    found = run.finish()
    assert runs.equal(found.approximation, trainer.posterior.approximation)
    assert found.report["laplace"] == trainer.posterior.config.diagnostics["laplace"]


def test_without_an_update_the_last_pass_is_at_the_start() -> None:
    rows, model = runs.token_rows(10), attach(with_lora(tiny_llama()))
    terms = sum(len(row["input_ids"]) - 1 for row in rows)
    scale = DataScale(num_data=terms, num_rows=10, num_terms=terms, rows_per_update=2)
    batches = partial(batches_by_number, rows, model=model, collate=default_data_collator, batch_size=2)
    for method, has_pass in ((LaplaceConfig(prior_std=0.1), True), (SGHMCConfig(num_chains=1), False)):
        data = DataAccess(batches, 10)
        run, *_ = start_run(model, method, scale, num_steps=6, learning_rate=1e-2, data=data)
        if has_pass:
            assert torch.equal(run.finish().approximation.means, run.theta)
        else:
            with pytest.raises(ValueError, match="the run has no update yet"):
                run.finish()


def test_a_fit_has_the_problem_of_a_run_on_the_same_model() -> None:
    model = attach(tiny_bert(num_labels=1), subspace="last_layer", noise_std=0.5)
    scale = DataScale(num_data=20.0, num_rows=10, num_terms=10, rows_per_update=2)
    run, *_ = start_run(model, SGHMCConfig(num_chains=1), scale, num_steps=4, learning_rate=1e-2, most_terms=1, seed=3)
    of_run, of_fit = run.problem, problem_for(model, run.problem.prior, 20.0, most_terms=1, seed=3)
    own = {"num_steps": 1, "update_fraction": None, "learning_rate": 1.0, "burn_in": 0, "draw_steps": of_fit.draw_steps}
    assert of_fit == of_run._replace(**own)
    assert (of_fit.likelihood, of_run.update_fraction) == (LikelihoodFacts(1, 1, 0.5), 0.2)


@pytest.mark.parametrize(("learning_rate", "expected"), [(None, [False, True] * 4), (1e-2, [False] * 8)])
def test_a_run_with_its_own_step_size_mirrors_chains(
    tmp_path: Path, learning_rate: float | None, expected: list[bool]
) -> None:
    method, rows = SGHMCConfig(num_chains=8, draws_per_chain=1), runs.token_rows(10)
    trainer = runs.trainer(tmp_path, method, train=rows, learning_rate=learning_rate, max_steps=40)
    rngs = runs.started(trainer).run.rngs
    assert [isinstance(rng, MirroredGenerator) for rng in rngs] == expected
