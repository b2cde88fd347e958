from __future__ import annotations

import hf_bayes
from hf_bayes.diagnostics.verdict import Diagnostics
from hf_bayes.posteriors.model_card_explanations import DIAGNOSTICS, METHODS, METRICS, explanation
from hf_bayes.training.outcome import KEPT_METRICS


def test_every_figure_is_explained() -> None:
    fields = set(Diagnostics(dim=1, distance=[1.0]).summary()) - {"verdict", "converged"}
    assert fields - DIAGNOSTICS.keys() == set()
    assert {*KEPT_METRICS, "map_nll", "map_nll_difference_std_error", "limit_nll"} - METRICS.keys() == set()
    assert hf_bayes.METHODS.keys() - METHODS.keys() == set()
    assert explanation(METRICS, "far_map_nll") == METRICS["map_nll"]
    assert explanation(METRICS, "mine") == ""
