"""A finished run is measured only where its energy is known, and within its share of the gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hf_bayes.methods.laplace.laplace import LaplaceConfig
from hf_bayes.methods.sgmcmc.sghmc import SGHMCConfig
from hf_bayes.methods.variational.mean_field import MeanFieldConfig
from hf_bayes.objectives import informed_spread
from hf_bayes.training.final_measurements import drift, informed_temperature, spread_plan
from tests import runs
from tests.methods import ladder_runs
from tests.tiny_models import tiny_bert
from tests.training.trained import StopAfter

SGHMC = SGHMCConfig(num_chains=2, draws_per_chain=3)


def finished(folder: Path, method: Any = SGHMC, **changes: Any) -> Any:
    """Return a finished run of six updates, unless a callback stops it, and its result."""
    trainer = runs.trainer(folder, method, **changes)
    trainer.train()
    return trainer.active, trainer.posterior.approximation


def classifier(folder: Path, method: Any, **changes: Any) -> Any:
    """Return a finished run of the last layer of a tiny Bert."""
    given = {"model": tiny_bert(), "subspace": "last_layer", "train": runs.label_rows(10), "map_updates": 0}
    return finished(folder, method, **given | changes)


@pytest.mark.parametrize("method", [SGHMC, MeanFieldConfig(num_chains=2)])
@pytest.mark.parametrize(("updates", "draws"), [(1, 1), (5, 2), (6, 3)])
def test_a_stopped_run_pays_for_the_gradients_it_took(tmp_path: Path, method: Any, updates: int, draws: int) -> None:
    active, found = finished(tmp_path, method, callbacks=[StopAfter(updates)])
    plan = spread_plan(active, found)
    passes = method.requirements.gradients_per_update
    assert plan.num_gradients == updates * 2 * 2 * passes  # rows in an update, chains
    assert plan.approximation is found
    assert found.num_stored == (2 * draws if method is SGHMC else 0)


@pytest.mark.parametrize(("share", "measured"), [(2.2, False), (2.6, True)])
def test_a_stopped_run_may_be_too_short_for_its_cost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float, measured: bool
) -> None:
    """Four draws and the point of the curvature take 50 gradients. The run took 20 of the 24 that it had planned."""
    monkeypatch.setattr(informed_spread, "SPREAD_SHARE", share)
    active, found = finished(tmp_path, callbacks=[StopAfter(5)])
    assert found.num_stored == 4
    assert (informed_temperature(active, found) is not None) == measured


def test_the_fitted_prior_of_a_run_is_not_measured(tmp_path: Path) -> None:
    assert spread_plan(*classifier(tmp_path / "given", LaplaceConfig())) is not None
    assert spread_plan(*classifier(tmp_path / "fitted", LaplaceConfig(fit_prior="evidence"))) is None


def test_a_run_that_found_a_temperature_is_not_measured(tmp_path: Path) -> None:
    trainer = ladder_runs.trainer(tmp_path, ladder_runs.config())
    trainer.train()
    found = trainer.posterior.approximation
    assert trainer.active.was_fitted
    assert spread_plan(trainer.active, found) is None
    assert informed_temperature(trainer.active, found) is None
    assert drift(trainer.active, found) is None
