from __future__ import annotations

import math

import numpy as np
import pytest
from sklearn.metrics import accuracy_score, log_loss, roc_auc_score

from hf_bayes.metrics import classification_statistics, evaluation_results, risk_coverage
from hf_bayes.metrics.evaluation import curves, uncertainties
from hf_bayes.metrics.figures import NEXT_TOKENS

Rows = dict[str, np.ndarray]


def rows_of(count: int, seed: int, *, sharpness: float = 3.0) -> tuple[np.ndarray, np.ndarray, Rows]:
    """Return probabilities and labels of rows, and their statistics with uncertainties."""
    rng = np.random.default_rng(seed)
    members = np.exp(sharpness * rng.normal(size=(4, count, 5)) + 3 * rng.normal(size=(count, 5)))
    members /= members.sum(-1, keepdims=True)
    mixture = members.mean(0)
    labels = np.array([rng.choice(5, p=row) for row in mixture])
    total = -(mixture * np.log(mixture)).sum(-1)
    aleatoric = -(members * np.log(members)).sum(-1).mean(0)
    found = classification_statistics(mixture, labels) | {"total": total, "epistemic": total - aleatoric}
    found["member_nll"] = -np.log(members[:, np.arange(count), labels]).mean(0)
    return mixture, labels, {name: values[:, None] for name, values in found.items()}


def test_figures_are_those_of_scikit_learn() -> None:
    mixture, labels, test = rows_of(120, 0)
    _, _, other = rows_of(60, 1, sharpness=1.0)
    found = evaluation_results(test, {"other": other})
    assert found["rows"] == {"test": 120, "other": 60}
    assert found["accuracy"] == accuracy_score(labels, mixture.argmax(1))
    assert found["nll"] == pytest.approx(log_loss(labels, mixture, labels=range(5)))
    assert found["std_error"]["accuracy"] == pytest.approx(np.std(test["correct"], ddof=1) / math.sqrt(120))
    is_other = np.repeat([0, 1], [120, 60])
    for measure in ("total", "epistemic"):
        scores = np.concatenate([test[measure], other[measure]])[:, 0]
        assert found["auroc"]["other"][measure] == pytest.approx(roc_auc_score(is_other, scores))
    errors = 1 - test["correct"][:, 0]
    assert found["aurc"]["confidence"] == risk_coverage(1 - mixture.max(1), errors).aurc
    assert found["std_error"]["auroc"]["other"]["total"] > 0
    assert found["std_error"]["aurc"]["epistemic"] > 0
    assert sum(found["reliability"]["num_examples"]) == 120


def test_perplexity_is_a_figure_of_next_tokens_alone() -> None:
    _, _, test = rows_of(12, 0)
    tokens = {name: values.reshape(3, 4) for name, values in test.items()}
    found = evaluation_results(tokens, {}, NEXT_TOKENS)
    assert found["perplexity"] == pytest.approx(math.exp(found["nll"]))
    assert found["rows"] == {"test": 3}
    assert "perplexity" not in evaluation_results(test, {})


def test_no_order_has_less_risk_than_errors_last() -> None:
    _, _, test = rows_of(80, 2)
    found = curves(test)
    assert all((found["best"].risk <= curve.risk + 1e-12).all() for curve in found.values())
    assert len({curve.risk[-1] for curve in found.values()}) == 1


def test_disagreement_of_one_member_is_no_measure() -> None:
    _, _, test = rows_of(10, 3)
    assert list(uncertainties(test)) == ["total", "epistemic", "confidence"]
    one = test | {"epistemic": np.zeros((10, 1))}
    assert list(uncertainties(one)) == ["total", "confidence"]
    found = evaluation_results(one, {"other": one})
    assert list(found["auroc"]["other"]) == ["total", "confidence"]
    assert "epistemic" not in found["aurc"]


def test_rows_of_unequal_length_are_not_padded_in_any_figure() -> None:
    _, _, test = rows_of(12, 4)
    _, _, other = rows_of(8, 5)
    lengths = np.array([5, 3, 4])
    places = np.arange(5) < lengths[:, None]

    def ragged(values: np.ndarray) -> np.ndarray:
        table = np.full(places.shape, np.nan)
        table[places] = values[:, 0]
        return table

    found = evaluation_results({name: ragged(values) for name, values in test.items()}, {"other": other})
    flat = evaluation_results(test, {"other": other})
    for name in ("nll", "accuracy", "brier", "ece", "total", "aurc"):
        assert found[name] == pytest.approx(flat[name])
    assert found["reliability"] == flat["reliability"]
    assert found["rows"] == {"test": 3, "other": 8}
    means = [test["total"][start:end].mean() for start, end in [(0, 5), (5, 8), (8, 12)]]
    scores = np.concatenate([means, other["total"][:, 0]])
    assert found["auroc"]["other"]["total"] == roc_auc_score(np.repeat([0, 1], [3, 8]), scores)
