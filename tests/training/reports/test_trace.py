from __future__ import annotations

from hf_bayes.training.reports.trace import thinned


def test_curves_are_thinned_for_plots_and_keep_their_end() -> None:
    assert thinned(list(range(200))) == list(range(200))
    thin = thinned(list(range(1, 1002)))
    assert len(thin) <= 200
    assert thin[-1] == 1001
