from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hf_bayes.cli.calibration_panels import _interval, draw_coverage, draw_deviations, draw_reliability
from hf_bayes.metrics import evaluation_results
from hf_bayes.metrics.figures import NUMBERS, SEVERAL_LABELS
from tests.metrics.test_figures import labelled, numbered


def axes_of(draw: Callable[..., None], results: dict[str, Any]) -> list[Axes]:
    figure = Figure(layout="constrained")
    draw(figure.subfigures(), results)
    return figure.axes


def points(axis: Axes) -> list[list[float]]:
    """Return [x, y] of each point with an interval."""
    (drawn,) = axis.containers
    return np.transpose(drawn[0].get_data()).tolist()


def test_the_reliability_diagram_shows_every_term_once() -> None:
    results = evaluation_results(labelled(40), {}, SEVERAL_LABELS)
    diagram, counts = axes_of(draw_reliability, results)
    bins = results["reliability"]
    assert [bar.get_height() for bar in counts.patches] == bins["num_examples"]
    assert sum(bins["num_examples"]) == 40 * 4
    used = [pair for pair in zip(bins["confidence"], bins["accuracy"], strict=True) if None not in pair]
    assert points(diagram) == [list(pair) for pair in used]
    assert (diagram.get_ylabel(), counts.get_xlabel()) == ("share of labels present", "probability of a label")


def test_coverage_is_drawn_at_every_level() -> None:
    results = evaluation_results(numbered(40), {}, NUMBERS)
    (axis,) = axes_of(draw_coverage, results)
    assert [x for x, _ in points(axis)] == results["coverage"]["level"]
    assert [y for _, y in points(axis)] == results["coverage"]["covered"]


def test_errors_are_drawn_over_their_deviations() -> None:
    results = evaluation_results(numbered(200), {}, NUMBERS)
    (axis,) = axes_of(draw_deviations, results)
    assert [x for x, _ in points(axis)] == results["deviations"]["predicted"]
    assert [y for _, y in points(axis)] == results["deviations"]["observed"]


def test_a_bin_without_errors_has_an_interval() -> None:
    low, high = _interval(1.0, 4.0)
    assert high == pytest.approx(1.0)
    assert low == pytest.approx(4 / (4 + 1), abs=0.01)  # n / (n + z^2) at z = 1
    centre = _interval(0.3, 10_000.0)
    assert centre == pytest.approx((0.3 - 0.00458, 0.3 + 0.00458), abs=1e-4)  # sqrt(0.3 * 0.7 / 10000)
