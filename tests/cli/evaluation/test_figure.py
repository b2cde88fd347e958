from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes

from hf_bayes.cli.evaluation.figure import DRAWINGS, plot
from hf_bayes.metrics import evaluation_results
from hf_bayes.metrics.figures import CLASSES, NEXT_TOKENS, NUMBERS, OWN_NUMBERS, SEVERAL_LABELS, TAGS, Figures
from tests.metrics.test_figures import labelled, numbered

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
    results = evaluation_results(found["test"], others)
    return plot(found, results, CLASSES), results


def labels_of(figure: Any) -> list[str]:
    return [axis.get_xlabel() for axis in figure.axes if axis.axison]


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


def test_one_member_has_no_panel_of_disagreement() -> None:
    figure, _ = figure_of(["other"], epistemic=0.0)
    assert "total uncertainty (nats)" in labels_of(figure)
    assert "epistemic uncertainty (nats)" not in labels_of(figure)


@pytest.mark.parametrize(
    ("figures", "rows", "labels"),
    [
        (SEVERAL_LABELS, labelled, ["total uncertainty (nats, sum over the labels)", "probability of a label"]),
        (NUMBERS, numbered, ["epistemic standard deviation (units of the labels)", "level of the predictive interval"]),
        (
            OWN_NUMBERS,
            numbered,
            [f"{part} standard deviation (units of the labels)" for part in ("predictive", "epistemic")],
        ),
    ],
)
def test_panels_are_those_of_the_labels(figures: Figures, rows: Any, labels: list[str]) -> None:
    found = {"test": rows(30), "other": rows(20, seed=1)}
    others = {"other": found["other"]}
    figure = plot(found, evaluation_results(found["test"], others, figures), figures)
    assert set(labels) <= set(labels_of(figure))
    assert "coverage: share answered, the least uncertain first" in labels_of(figure)
    assert len(figure.subfigs) == 4


def test_every_kind_of_labels_has_a_drawing() -> None:
    assert set(DRAWINGS) == {
        figures.kind for figures in (CLASSES, NEXT_TOKENS, TAGS, SEVERAL_LABELS, NUMBERS, OWN_NUMBERS)
    }


def test_a_legend_lies_outside_its_panel() -> None:
    figure, _ = figure_of(["a", "b"])
    figure.draw_without_rendering()
    for axis in figure.axes:
        legend = axis.get_legend()
        assert legend is None or legend.get_window_extent().y1 < axis.get_window_extent().y0


def test_the_first_rows_do_not_scale_the_risk() -> None:
    test = numbered(100)
    first = test["epistemic_std"].argmin()
    test["label"][first] = test["prediction"][first] + 1000.0
    figure = plot({"test": test}, evaluation_results(test, {}, NUMBERS), NUMBERS)
    axis = next(axis for axis in figure.axes if axis.get_ylabel().startswith("risk"))
    assert axis.get_ylim()[1] == pytest.approx(1.1 * 1000**2 / 5, rel=1e-3)  # at a coverage of 5 of 100 rows
