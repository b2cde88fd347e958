from __future__ import annotations

import hf_bayes
from hf_bayes.diagnostics.verdict import Diagnostics
from hf_bayes.distributions.approximations import GAUSSIANS
from hf_bayes.posteriors.model_card_explanations import (
    COVARIANCES,
    DIAGNOSTICS,
    METHODS,
    METRICS,
    awaits_temperature,
    explanation,
)
from hf_bayes.training.heldout_metrics import KEPT_METRICS


def test_every_figure_is_explained() -> None:
    fields = set(Diagnostics(dim=1, distance=[1.0]).summary()) - {"verdict", "converged"}
    assert fields - DIAGNOSTICS.keys() == set()
    assert {*KEPT_METRICS, "map_nll", "map_nll_difference_std_error", "limit_nll"} - METRICS.keys() == set()
    assert hf_bayes.METHODS.keys() - METHODS.keys() == set()
    assert COVARIANCES.keys() == GAUSSIANS.keys()
    assert explanation(METRICS, "far_map_nll") == METRICS["map_nll"]
    assert explanation(METRICS, "mine") == ""


def test_a_temperature_is_awaited_while_its_ladder_is_there() -> None:
    assert awaits_temperature({"temperature": 1.0, "ladder": {"temperature": [1.0, 0.3]}})
    for ladder in (None, {"prior_scale": [1.0, 2.0]}, "temperature", 3):  # files may hold anything
        assert not awaits_temperature({"temperature": 1.0, "ladder": ladder})
    assert not awaits_temperature({"temperature": 1.0})
