from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes

from hf_bayes.cli.evaluation_figure import _interval, plot
from hf_bayes.metrics import evaluation_results

NAMES = [f"$set{number}" for number in range(7)]


def statistics(count: int, seed: int, *, epistemic: float = 0.2, terms: int = 1) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    confidence = rng.uniform(0.3, 1, (count, terms))
    correct = (rng.random((count, terms)) < confidence).astype(float)
    found = {"nll": -np.log(confidence), "confidence": confidence, "correct": correct, "brier": (1 - confidence) ** 2}
    return {**found, "total": 1 - confidence, "epistemic": epistemic * rng.random((count, terms))}


def figure_of(names: list[str], **fields: Any) -> tuple[Any, dict[str, Any]]:
    found = {name: statistics(40, seed, **fields) for seed, name in enumerate(["test", *names])}
    others = {name: found[name] for name in names}
    results = evaluation_results(found["test"], others, next_tokens=False)
    return plot(found, results), results


def test_every_set_has_a_histogram_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[dict[str, Any]] = []
    histogram = Axes.hist

    def hist(self: Axes, values: Any, *args: Any, **options: Any) -> Any:
        drawn.append({name: value for name, value in options.items() if name != "weights"})
        assert options["weights"].sum() == pytest.approx(1)
        return histogram(self, values, *args, **options)

    monkeypatch.setattr(Axes, "hist", hist)
    figure_of(NAMES)
    labels = [str(options.pop("label")).split(" ")[0] for options in drawn]
    assert labels == ["test", *NAMES] * 2
    assert len({json.dumps(options) for options in drawn}) == len(NAMES) + 1


def test_no_label_leaves_the_figure() -> None:
    figure, _ = figure_of(NAMES, terms=5)
    figure.draw_without_rendering()  # places the parts
    for axis in figure.axes:
        box = axis.get_tightbbox()
        assert box is not None
        assert min(box.x0, box.y0) >= 0
        assert box.x1 <= figure.bbox.width
        assert box.y1 <= figure.bbox.height


def test_the_reliability_diagram_shows_every_row_once() -> None:
    figure, results = figure_of(["other"])
    counts = next(axis for axis in figure.axes if axis.get_ylabel() == "count")
    assert [bar.get_height() for bar in counts.patches] == results["reliability"]["num_examples"]
    assert sum(results["reliability"]["num_examples"]) == 40


def test_a_bin_without_errors_has_an_interval() -> None:
    low, high = _interval(1.0, 4.0)
    assert high == pytest.approx(1.0)
    assert low == pytest.approx(4 / (4 + 1), abs=0.01)  # n / (n + z^2) at z = 1
    centre = _interval(0.3, 10_000.0)
    assert centre == pytest.approx((0.3 - 0.00458, 0.3 + 0.00458), abs=1e-4)  # sqrt(0.3 * 0.7 / 10000)


def test_one_member_has_no_panel_of_disagreement() -> None:
    figure, _ = figure_of(["other"], epistemic=0.0)
    labels = [axis.get_xlabel() for axis in figure.axes if axis.axison]
    assert "total uncertainty (nats)" in labels
    assert "epistemic uncertainty (nats)" not in labels
