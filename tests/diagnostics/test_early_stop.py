from __future__ import annotations

import dataclasses

import pytest

from tests.diagnostics.good_run import GOOD

STOPPED = {"stopped_at": 20, "num_planned_updates": 110, "num_draws_before_stop": 0, "rhat": None, "ess": None}


@pytest.mark.parametrize("chosen_temperature", [None, 0.3])
def test_a_sampler_stopped_before_its_first_draw_has_none(chosen_temperature: float | None) -> None:
    run = dataclasses.replace(GOOD, **STOPPED, chosen_temperature=chosen_temperature)
    assert run.converged is False
    assert run.verdict == (
        "stopped at update 20 of 110, before sampling: these are no draws of the posterior; let the run make all of "
        "its updates"
    )
    assert run.summary()["stopped_at"] == 20


def test_states_of_burn_in_have_no_spread_of_the_posterior() -> None:
    run = dataclasses.replace(GOOD, **STOPPED, temperature=1.0, informed_spread=1.0, informed_spread_std_error=0.02)
    assert run.epistemic_size is None


def test_draws_from_before_a_stop_are_judged_as_draws() -> None:
    some = dataclasses.replace(GOOD, stopped_at=90, num_planned_updates=110, num_draws_before_stop=2)
    assert some.verdict == "converged"
    assert dataclasses.replace(some, rhat=1.3).verdict == "R-hat 1.30 over 4 chains: longer burn-in"


@pytest.mark.parametrize("kind", ["optimum", "gaussian"])
def test_an_optimiser_may_end_early(kind: str) -> None:
    assert "stopped" not in dataclasses.replace(GOOD, **STOPPED, kind=kind).verdict
