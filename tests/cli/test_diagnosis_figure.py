from __future__ import annotations

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from hf_bayes.cli.diagnosis_figure import plot


@pytest.mark.parametrize("length", [3, 12, 40])
def test_a_long_verdict_stays_within_the_figure(length: int) -> None:
    verdict = "; ".join([" ".join(["positions"] * length), "no R-hat"])
    found = {"verdict": verdict, "unmoved": [0.0, 0.0]}
    figure = plot({"method": {"name": "sghmc"}, "diagnostics": found}, {})
    assert figure is not None
    title = figure.texts[0]
    box = title.get_window_extent(FigureCanvasAgg(figure).get_renderer())
    assert box.width <= figure.bbox.width
    assert title.get_text().split() == f"sghmc: {verdict}".split()
