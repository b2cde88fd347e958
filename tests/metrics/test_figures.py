from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import norm
from sklearn.metrics import accuracy_score, brier_score_loss, f1_score, log_loss

from hf_bayes.metrics.evaluation import curves, evaluation_results
from hf_bayes.metrics.figures import NUMBERS, SEVERAL_LABELS, Figures, terms

Rows = dict[str, np.ndarray]


def labelled(count: int, *, num_labels: int = 4, seed: int = 0) -> Rows:
    """Return the statistics of rows with several labels, of which the last never occurs."""
    rng = np.random.default_rng(seed)
    probability = rng.beta(0.5, 0.5, size=(count, num_labels)).clip(0.001, 0.999)
    label = (rng.random(probability.shape) < probability).astype(float)
    label[:, -1] = 0
    label_nll = -np.log(np.where(label == 1, probability, 1 - probability))
    surest = np.maximum(probability, 1 - probability)
    return {
        "label": label,
        "probability": probability,
        "label_nll": label_nll,
        "brier": (probability - label) ** 2,
        "nll": label_nll.sum(1, keepdims=True),
        "correct": ((probability > 0.5) == label).all(1, keepdims=True).astype(float),
        "confidence": surest.prod(1, keepdims=True),
        "total": -np.log(surest).sum(1, keepdims=True),
        "epistemic": rng.random((count, 1)),
    }


def numbered(count: int, *, noise: float = 1.0, seed: int = 0) -> Rows:
    """Return the statistics of a regression whose labels have so many times the predicted deviation."""
    rng = np.random.default_rng(seed)
    prediction, epistemic = rng.normal(size=(count, 1)), rng.uniform(0.1, 2, size=(count, 1))
    deviation = np.sqrt(epistemic**2 + 0.25)
    label = prediction + noise * deviation * rng.normal(size=(count, 1))
    found = {"label": label, "prediction": prediction, "predictive_std": deviation, "epistemic_std": epistemic}
    return {
        **found,
        "below": norm.cdf(label, prediction, deviation),
        "nll": -norm.logpdf(label, prediction, deviation),
    }


def scores(test: Rows, figures: Figures) -> dict[str, float]:
    """Return the figures that are functions of statistics, without standard errors."""
    return {name: function(test) for name, function in figures.functions.items()}


def test_figures_of_several_labels_are_those_of_scikit_learn() -> None:
    test = labelled(150)
    found = evaluation_results(test, {"other": labelled(20, seed=1)}, SEVERAL_LABELS)
    label, predicted = test["label"].astype(int), (test["probability"] > 0.5).astype(int)
    assert found["exact_match"] == accuracy_score(label, predicted)
    for average in ("micro", "macro"):
        expected = f1_score(label, predicted, average=average, zero_division=0)
        assert found[f"{average}_f1"] == expected
        assert 0 < found["std_error"][f"{average}_f1"] < 0.1
    columns = list(zip(label.T, test["probability"].T, strict=True))
    assert found["label_nll"] == pytest.approx(np.mean([log_loss(*one, labels=[0, 1]) for one in columns]))
    assert found["brier"] == pytest.approx(np.mean([brier_score_loss(*one) for one in columns]))
    assert set(found["aurc"]) == {"total", "epistemic", "confidence", "best"}
    assert set(found["auroc"]["other"]) == {"total", "epistemic", "confidence"}


def test_f1_of_a_single_label_is_that_of_its_presence() -> None:
    test = labelled(200, num_labels=2)
    test = {name: value[:, :1] for name, value in test.items()}
    label, predicted = test["label"][:, 0], test["probability"][:, 0] > 0.5
    found = scores(test, SEVERAL_LABELS)
    assert found["micro_f1"] == found["macro_f1"] == f1_score(label, predicted)
    assert found["micro_f1"] != accuracy_score(label, predicted)


def test_ece_of_several_labels_compares_each_probability() -> None:
    test = labelled(300)
    probability, label = test["probability"].ravel(), test["label"].ravel()
    bins = np.ceil(probability * 15)
    gaps = [(bins == one).mean() * abs((label - probability)[bins == one].mean()) for one in np.unique(bins)]
    assert scores(test, SEVERAL_LABELS)["ece"] == pytest.approx(sum(gaps))
    assert sum(SEVERAL_LABELS.diagrams["reliability"](test)["num_examples"]) == 300 * 4


def test_figures_of_numbers_follow_from_their_definitions() -> None:
    test = numbered(400, noise=2.0)
    found = evaluation_results(test, {"other": numbered(30, seed=1)}, NUMBERS)
    error = test["label"] - test["prediction"]
    assert found["rmse"] == pytest.approx(np.sqrt((error**2).mean()))
    assert found["standardised_rmse"] == pytest.approx(np.sqrt(((error / test["predictive_std"]) ** 2).mean()))
    for percent in (50, 90, 95):
        inside = np.abs(error) <= norm.ppf(0.5 + percent / 200) * test["predictive_std"]
        assert found[f"coverage_{percent}"] == pytest.approx(inside.mean())
    assert list(found["auroc"]["other"]) == ["epistemic_std"]
    assert found["coverage"]["covered"][17] == found["coverage_90"]
    assert sum(found["deviations"]["num_examples"]) == 400


def test_deviations_that_are_too_small_show_in_every_figure() -> None:
    right, wrong = (scores(numbered(2000, noise=noise), NUMBERS) for noise in (1.0, 2.0))
    # four standard errors of a share, and of a root mean square, of 2000 rows
    assert right["coverage_90"] == pytest.approx(0.9, abs=4 * np.sqrt(0.09 / 2000))
    assert right["standardised_rmse"] == pytest.approx(1, abs=4 / np.sqrt(4000))
    assert wrong["coverage_90"] < 0.7
    assert wrong["standardised_rmse"] > 1.9
    assert wrong["ence"] > 0.8 > 0.2 > right["ence"]


def test_risk_of_numbers_is_their_squared_error() -> None:
    test = numbered(100)
    found = {name: curve.aurc for name, curve in curves(test, NUMBERS).items()}
    squares = ((test["label"] - test["prediction"]) ** 2)[np.argsort(test["epistemic_std"][:, 0]), 0]
    assert found["epistemic_std"] == pytest.approx((np.cumsum(squares) / np.arange(1, 101)).mean())
    assert found["best"] < found["epistemic_std"]


def test_a_point_estimate_of_numbers_has_no_order() -> None:
    one = numbered(50) | {"epistemic_std": np.zeros((50, 1))}
    found = evaluation_results(one, {"other": one}, NUMBERS)
    assert list(found["aurc"]) == ["best"]
    assert found["auroc"] == {"other": {}}


def test_places_without_a_term_are_left_out() -> None:
    assert terms(np.array([[1.0, np.nan], [2.0, 3.0]])).tolist() == [1, 2, 3]
