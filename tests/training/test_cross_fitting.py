"""The temperature of a mixture without held-out rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import default_data_collator

from hf_bayes import attach, cross_fit_calibration, fit_calibration
from hf_bayes.methods.averaging.ensemble import EnsembleConfig
from hf_bayes.methods.laplace.laplace import LaplaceConfig
from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from hf_bayes.posteriors.posterior import Posterior
from hf_bayes.training import cross_fitting
from hf_bayes.uncertainty.custom.ordinal import Ordinal
from tests import runs
from tests.tiny_models import tiny_bert

ROWS = runs.label_rows(60)
CHANGES: dict[str, Any] = {"max_steps": 60, "learning_rate": 0.3, "per_device_train_batch_size": 10}


def trained(directory: Path, method: Any = None, rows: Any = ROWS) -> Posterior:
    """Learn random labels by heart, without held-out rows."""
    method = EnsembleConfig(num_chains=2, prior_std=3.0) if method is None else method
    run = runs.trainer(directory, method, model=tiny_bert(), subspace="last_layer", train=rows, **CHANGES)
    run.train()
    run.bayesian.detach()
    return run.posterior


def cross_fitted(directory: Path, posterior: Posterior, rows: Any = ROWS, **given: Any) -> Posterior:
    args = runs.arguments(directory, **CHANGES)
    return cross_fit_calibration(
        posterior, given.pop("model", None) or tiny_bert(), args, train_dataset=rows, subspace="last_layer",
        data_collator=default_data_collator, **given,
    )  # fmt: skip


def test_it_sees_that_labels_were_learnt_by_heart(tmp_path: Path) -> None:
    posterior = trained(tmp_path)
    found = cross_fitted(tmp_path, posterior, num_folds=3).config.calibration
    assert found["temperature"] > 1.2
    assert (found["num_terms"], found["num_members"]) == (60, 2)
    assert found["calibrated_nll"] < found["nll"]
    # the twin: the rows of the run itself, which it has learnt
    twin = fit_calibration(posterior, ROWS, base_model=tiny_bert()).config.calibration
    assert twin["temperature"] < found["temperature"] - 0.2
    assert twin["nll"] < found["nll"] - 0.1


def test_every_fold_is_predicted_by_a_run_without_it(tmp_path: Path) -> None:
    posterior = trained(tmp_path, rows=ROWS[:50])
    found = cross_fitted(tmp_path, posterior, ROWS[:50], num_folds=50 // 5).config.calibration
    assert found["num_terms"] == 50


def test_a_laplace_approximation_predicts_as_when_it_is_loaded(tmp_path: Path) -> None:
    posterior = trained(tmp_path, LaplaceConfig(structure="diagonal", prior_std=3.0))
    found = cross_fitted(tmp_path, posterior, num_folds=2).config.calibration
    assert (found["prediction"], found["num_members"]) == ("linearised", 0)


def test_the_model_comes_back_as_it_was(tmp_path: Path) -> None:
    model = tiny_bert()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    cross_fitted(tmp_path, trained(tmp_path), num_folds=2, model=model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def folds_of(
    monkeypatch: pytest.MonkeyPatch,
    directory: Path,
    method: SGHMCConfig,
    *,
    rate: float | None,
    fold_rate: float | None,
) -> list[tuple[Any, ...]]:
    """Return (own step size, updates, warm start, its rate, burn-in, draw steps) of a run and of its 2 folds."""
    lengths: dict[str, Any] = {"max_steps": -1, "num_train_epochs": 4, "per_device_train_batch_size": 5}
    found: list[tuple[Any, ...]] = []
    finished = cross_fitting.finished_run

    def keep(run: Any) -> None:
        problem, config = run.run.problem, run.method
        rate = config.warm_start_learning_rate
        found.append((problem.own_step_size, problem.num_steps, config.warm_start_steps, rate, problem.burn_in))
        found[-1] += (problem.draw_steps,)

    @contextmanager
    def kept(*args: Any, **options: Any) -> Iterator[Any]:
        with finished(*args, **options) as run:
            keep(run)
            yield run

    monkeypatch.setattr(cross_fitting, "finished_run", kept)
    given: dict[str, Any] = {"train": ROWS * 2, "model": tiny_bert(), "subspace": "last_layer"}
    run = runs.trainer(directory, method, **given, **lengths, learning_rate=rate)
    run.train()
    keep(run)
    run.bayesian.detach()
    args = runs.arguments(directory, **lengths, learning_rate=fold_rate)
    options: dict[str, Any] = {"subspace": "last_layer", "num_folds": 2, "data_collator": default_data_collator}
    cross_fit_calibration(run.posterior, tiny_bert(), args, train_dataset=ROWS * 2, **options)
    return found


def test_counts_of_updates_are_in_proportion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    method = SGHMCConfig(
        num_chains=2, draws_per_chain=3, thin=10, burn_in=64, warm_start_steps=32, warm_start_learning_rate=1e-2
    )
    run, *folds = folds_of(monkeypatch, tmp_path, method, rate=1e-3, fold_rate=1e-3)
    assert run == (False, 96, 32, 1e-2, 64, range(76, 97, 10))
    assert folds == [(False, 48, 16, 1e-2, 32, range(38, 49, 5))] * 2


def test_folds_find_their_step_size_as_the_run_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # without a method, a trainer gives its learning rate to the warm start, and the run has none
    method = SGHMCConfig(num_chains=2, warm_start_learning_rate=5e-3)
    run, *folds = folds_of(monkeypatch, tmp_path, method, rate=None, fold_rate=5e-3)
    assert run == (True, 96, 48, 5e-3, 62, range(96, 97))
    assert folds == [(True, 48, 24, 5e-3, 31, range(48, 49))] * 2


def test_folds_have_the_warm_start_that_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    method = SGHMCConfig(num_chains=2, warm_start_steps=20, burn_in=0.5, warm_start_learning_rate=5e-3)
    run, *folds = folds_of(monkeypatch, tmp_path, method, rate=None, fold_rate=None)
    assert run[:5] == (True, 96, 20, 5e-3, 48)
    assert [fold[:5] for fold in folds] == [(True, 48, 10, 5e-3, 24)] * 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_folds": 1}, "num_folds must be an integer >= 2, got 1"),
        ({"num_folds": 40}, "40 folds need at least 80 rows, got 60: lower num_folds"),
        ({"model": attach(tiny_bert(), subspace="last_layer")}, "cross_fit_calibration attaches the model anew"),
        ({"rows": iter(ROWS)}, "folds need a train_dataset with a length, got list_iterator"),
    ],
)
def test_bad_input_is_refused_before_the_first_run(tmp_path: Path, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cross_fitted(tmp_path, trained(tmp_path), **given)


def test_a_method_with_held_out_rows_is_refused(tmp_path: Path) -> None:
    posterior = trained(tmp_path, SGHMCConfig(num_chains=2))
    posterior.config.method["ladder"] = {"temperature": [1, 0.1]}
    with pytest.raises(ValueError, match="is for runs without held-out rows, and ladder needs some"):
        cross_fitted(tmp_path, posterior)


def test_folds_have_the_likelihood_of_the_posterior(tmp_path: Path) -> None:
    method, model = EnsembleConfig(num_chains=2, prior_std=3.0), tiny_bert(num_labels=2)
    run = runs.trainer(
        tmp_path, method, model=model, subspace="last_layer", train=ROWS, likelihood=Ordinal(num_classes=3), **CHANGES
    )
    run.train()
    run.bayesian.detach()
    found = cross_fitted(tmp_path, run.posterior, num_folds=2, model=model).config  # two outputs, three classes
    assert found.calibration["num_terms"] == 60
    assert found.head["likelihood"] == Ordinal(num_classes=3).to_dict()
