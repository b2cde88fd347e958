"""Verdicts of runs against exact posteriors: what counts as agreement."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from hf_bayes import LaplaceConfig
from hf_bayes.diagnostics.verdict import Diagnostics
from scripts.reproduce.gold_chains import Gold
from scripts.reproduce.gold_targets import FeaturesConfig
from scripts.reproduce.verdicts import Case, agrees, idea_of, measured, size_agrees
from tests.scripts.test_golds import small_target


def run_of(eu: float, **measurements: Any) -> dict[str, Any]:
    """Return the record of a run of four chains."""
    known = {"rhat": 1.01, "ess": 400.0, "num_values": 100, "temperature": 1.0, "informed_spread_std_error": 0.03}
    return {"eu": eu, "measurements": {"dim": 9, "distance": [0.3] * 4, **known, **measurements}}


def test_too_few_draws_agree_in_size_and_not_in_convergence() -> None:
    few = run_of(1.05, informed_spread=1.02, ess=40.0)
    assert size_agrees(few)
    assert not agrees(few)
    hot = run_of(1.5, informed_spread=1.6, ess=40.0)
    assert size_agrees(hot)
    assert agrees(hot)
    # the twin: a spread that says "right" of an EU that is wrong
    assert not size_agrees(run_of(1.5, informed_spread=1.02))


def test_a_run_is_measured_against_its_gold(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = small_target()
    monkeypatch.setattr(FeaturesConfig, "num_features", rows.features.shape[1])
    gold = Gold(torch.full((20, 3), 1 / 3), torch.ones(20), {})
    found = measured(rows, gold, Case(LaplaceConfig(num_chains=1, structure="full"), epochs=5, batch=16))
    assert 0 < found["tv"] < 1
    assert 0 < found["eu"] < math.log(3)  # relative to an EU of one nat
    assert Diagnostics(**{"dim": 15, "distance": [0.1], **found["measurements"]}).kind == "gaussian"


def test_the_first_mark_in_a_verdict_is_its_idea() -> None:
    small = "the positions are on their way from their start: longer burn-in; the draws are too narrow along ..."
    assert idea_of(small).says.startswith("the chains are still near their start")
    assert idea_of(f"{small} The size of epistemic uncertainty is right nevertheless").says.startswith("the size of EU")
    with pytest.raises(ValueError, match="no idea has the words of the verdict 'divergent moves'"):
        idea_of("divergent moves")
