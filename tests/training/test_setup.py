from __future__ import annotations

import dataclasses
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from datasets import Dataset
from transformers import default_data_collator

from hf_bayes import BayesianModelForSequenceClassification, fit_calibration
from hf_bayes.methods.averaging.ensemble import EnsembleConfig
from hf_bayes.methods.averaging.swag import SWAGConfig
from hf_bayes.methods.laplace.laplace import LaplaceConfig
from hf_bayes.methods.recommended import LEAST_UPDATES
from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from hf_bayes.training import session
from hf_bayes.training.active_run import ActiveRun
from hf_bayes.training.trainer import BayesianTrainer
from tests import runs
from tests.members.subject_models import resnet
from tests.tiny_models import images, tiny_bert, tiny_llama, with_lora


@pytest.mark.parametrize("changes", [{"num_chains": 3}, {"num_chains": 3, "prior_mean": "initial"}])
def test_chains_start_in_different_places_around_the_model(tmp_path, changes):
    trainer = runs.trainer(tmp_path, SGHMCConfig(init_jitter=0.1, **changes))
    distance = (trainer.bayesian.theta.detach() - trainer.setup.start).norm(dim=1) / trainer.setup.start.norm()
    assert ((distance > 0.05) & (distance < 0.2)).all()
    assert all(not torch.equal(a, b) for a, b in pairwise(trainer.bayesian.theta.detach()))


def test_a_model_that_another_trainer_holds_is_refused(tmp_path):
    model = with_lora(tiny_llama())
    first = runs.trainer(tmp_path / "first", SGHMCConfig(), model=model)
    with pytest.raises(ValueError, match="attached already: detach"):
        runs.trainer(tmp_path / "second", SGHMCConfig(), model=model)
    first.bayesian.detach()
    runs.trainer(tmp_path / "second", SGHMCConfig(), model=model).bayesian.detach()


def calibrated(folder: Path) -> Any:
    """Return a Laplace approximation on its base, which predicts linearised at a temperature of the mixture."""
    run = runs.trainer(
        folder, LaplaceConfig(num_chains=1), model=tiny_bert(), subspace="last_layer", train=runs.label_rows(10),
        max_steps=3, map_updates=0,
    )  # fmt: skip
    run.train()
    rows = [{"labels" if name == "label" else name: v for name, v in row.items()} for row in runs.label_rows(80)]
    fitted = fit_calibration(run.posterior, rows, base_model=tiny_bert())
    config = dataclasses.replace(fitted.config, calibration={**fitted.config.calibration, "temperature": 1.5})
    posterior = dataclasses.replace(fitted, config=config)
    return BayesianModelForSequenceClassification.from_pretrained(posterior, base_model=tiny_bert())


def test_a_refused_trainer_leaves_an_attached_model_as_it_was(tmp_path: Path) -> None:
    model = calibrated(tmp_path / "prior")
    model.members_per_pass = 2
    theta, predictor = model.theta.detach().clone(), model.predictor
    assert model.predicted_by.prediction == "linearised"
    for row in ({"input_ids": [5], "label": 9}, {"input_ids": [5]}):
        with pytest.raises(ValueError, match="label"):
            runs.trainer(tmp_path / "run", SGHMCConfig(num_chains=3), model=model, train=[row])
        assert torch.equal(model.theta, theta)
        assert model.predictor is predictor
        assert model.mixture_temperature == 1.5
        assert model.members_per_pass == 2
        assert model.calibrated


def test_chains_do_not_take_the_temperature_of_the_posterior(tmp_path: Path) -> None:
    model = calibrated(tmp_path / "prior")
    assert model.mixture_temperature == 1.5
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="these predictions are not calibrated")
        run = runs.trainer(tmp_path / "run", SWAGConfig(rank=2), model=model, train=runs.label_rows(10), map_updates=0)
        assert model.predicted_by.prediction == "members"
        assert model.mixture_temperature == 1
        run.train()
    assert model.mixture_temperature == 1


@pytest.mark.parametrize(
    "method", [SGHMCConfig(num_chains=2, draws_per_chain=2, burn_in=0), LaplaceConfig(fit_noise=True)]
)
def test_a_refused_second_run_leaves_the_first_as_it_was(tmp_path, method):
    rows = [{**row, "label": float(row["label"])} for row in runs.label_rows(40)]
    given = {"train": rows, "subspace": "last_layer", "eval_dataset": rows, "noise_std": 0.5}
    other = runs.trainer(
        tmp_path / "other", method, model=tiny_bert(num_labels=1), save_strategy="steps", save_steps=3,
        **given | {"learning_rate": 1e-3},
    )  # fmt: skip
    other.train()
    trainer = runs.trainer(tmp_path / "run", method, model=tiny_bert(num_labels=1), **given)
    trainer.train()
    likelihood, posterior, before = trainer.bayesian.likelihood, trainer.posterior, trainer.evaluate()["eval_loss"]
    with pytest.raises(ValueError, match="learning_rate"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "other" / "checkpoint-3"))
    assert trainer.bayesian.likelihood is likelihood
    assert trainer.posterior is posterior
    assert trainer.evaluate()["eval_loss"] == before


@pytest.mark.parametrize("trains_before", [False, True])
def test_a_refused_run_leaves_the_statistics_of_batch_norms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trains_before: bool
) -> None:
    rows = [{"pixel_values": pixels, "labels": 1} for pixels in images(6)["pixel_values"]]
    trainer = runs.trainer(
        tmp_path, EnsembleConfig(num_chains=2), model=resnet(torch.float32).eval(), train=rows, subspace="all",
        map_updates=0,
    )  # fmt: skip
    if trains_before:
        trainer.train()
    before = trainer.bayesian(**images(3)).logits

    def refuse(active: ActiveRun) -> NoReturn:
        raise ValueError("refused")

    monkeypatch.setattr(session, "announce", refuse)
    with pytest.raises(ValueError, match="refused"):
        trainer.train()
    assert torch.equal(trainer.bayesian(**images(3)).logits, before)


def test_without_a_method_held_out_rows_choose_the_temperature(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given = {"model": tiny_bert(), "subspace": "last_layer", "train": runs.label_rows(40), "learning_rate": None}
    few = runs.trainer(tmp_path, None, **given, eval_dataset=runs.label_rows(199), max_steps=120)
    assert few.method == EnsembleConfig(num_chains=4)
    assert "a deep ensemble of 4, because the temperature T of SGHMC is chosen on 200 held-out rows" in caplog.text
    few.bayesian.detach()
    heldout = {"heldout": Dataset.from_list(runs.label_rows(200, seed=1))}
    least = {"max_steps": LEAST_UPDATES, "per_device_eval_batch_size": 100}
    run = runs.trainer(tmp_path, None, **given, eval_dataset=heldout, **least)
    assert "no method was given: SGHMC, and 200 held-out rows choose T" in caplog.text
    run.train()
    stored = run.posterior.config
    assert stored.diagnostics["ladder_temperature"] == [1.0, 0.3, 0.1, 0.03]
    assert stored.method["temperature"] in (1.0, 0.3, 0.1, 0.03)
    at_last = stored.diagnostics["ladder_drawn_at"].count(stored.method["temperature"])
    assert stored.num_members == 4 * max(at_last, 1)  # without draws from before a fall of T


def test_without_a_method_a_short_run_trains_an_ensemble(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = {"train": runs.label_rows(40), "eval_dataset": runs.label_rows(200, seed=1)}
    epochs = {"learning_rate": None, "max_steps": -1, "num_train_epochs": 3, "per_device_train_batch_size": 4}
    run = runs.trainer(tmp_path, None, model=tiny_bert(), subspace="last_layer", **rows, **epochs)
    assert run.method == EnsembleConfig(num_chains=4)
    assert "a deep ensemble of 4, because the run has 30 updates, and SGHMC needs 107" in caplog.text
    run.train()
    assert run.posterior.config.num_members == 4


def test_a_rate_without_a_method_is_that_of_adamw(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A script for plain fine-tuning keeps its learning rate, and the sampler still finds its own step size."""
    saves = {"save_strategy": "steps", "save_steps": 80}
    args = runs.arguments(tmp_path, learning_rate=0.02, max_steps=120, **saves)
    rows = {"train_dataset": runs.token_rows(16), "eval_dataset": runs.token_rows(40, seed=1)}
    sets = {name: Dataset.from_list(part) for name, part in rows.items()}
    given = {"args": args, "data_collator": default_data_collator, **sets}
    run = BayesianTrainer(with_lora(tiny_llama()), **given)
    run.train()
    assert "; learning_rate=0.02 is that of its warm start by AdamW" in caplog.text
    assert args.learning_rate == 0.02
    assert run.adamw_learning_rate == run.method.warm_start_learning_rate == 0.02
    assert run.method.num_warm_start_steps == 60
    assert bool((run.run.state.step_size > 0).all())
    again = BayesianTrainer(with_lora(tiny_llama()), **given)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-80"))
    assert all(torch.equal(a, b) for a, b in zip(run.run.draws, again.run.draws, strict=True))


def test_a_rate_without_a_method_is_that_of_an_ensemble(tmp_path: Path) -> None:
    run = runs.trainer(tmp_path, None, learning_rate=0.02, max_steps=4)
    run.train()
    assert run.method.name == "ensemble"
    assert run.adamw_learning_rate == 0.02
