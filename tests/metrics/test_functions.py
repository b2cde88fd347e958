from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import log_loss, roc_auc_score

from hf_bayes.metrics import (
    average_coverage_error,
    brier,
    classification_statistics,
    expected_calibration_error,
    negative_log_likelihood,
    ood_auroc,
    perplexity,
    reliability,
    risk_coverage,
    summarise,
)


@pytest.fixture
def classified() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    probabilities = rng.dirichlet([0.5] * 5, size=400)
    labels = np.array([rng.choice(5, p=row**2 / (row**2).sum()) for row in probabilities])
    return probabilities, labels


def ece_by_hand(confidence: np.ndarray, correct: np.ndarray, num_bins: int) -> float:
    total = 0.0
    for b in range(num_bins):
        inside = (confidence > b / num_bins) & (confidence <= (b + 1) / num_bins)
        if inside.any():
            total += inside.mean() * abs(correct[inside].mean() - confidence[inside].mean())
    return total


def test_nll_is_the_mean_log_loss_in_nats(classified: tuple[np.ndarray, np.ndarray]) -> None:
    statistics = classification_statistics(*classified)
    expected = log_loss(classified[1], classified[0], labels=range(5))
    assert negative_log_likelihood(statistics["nll"]) == pytest.approx(expected, abs=1e-12)
    assert negative_log_likelihood(statistics["nll"] / math.log(2)) != pytest.approx(expected, abs=1e-2)  # in bits


def test_nll_of_an_impossible_label_is_infinite() -> None:
    statistics = classification_statistics([[1.0, 0.0], [0.5, 0.5]], [1, 0])
    assert negative_log_likelihood(statistics["nll"]) == math.inf


def test_perplexity_is_the_number_of_equally_likely_tokens() -> None:
    assert perplexity(math.log(50)) == pytest.approx(50)
    assert perplexity(1e5) == math.inf


def test_brier_is_the_squared_distance_to_the_label(classified: tuple[np.ndarray, np.ndarray]) -> None:
    probabilities, labels = classified
    expected = np.square(probabilities - np.eye(5)[labels]).sum(1).mean()
    assert brier(classification_statistics(probabilities, labels)["brier"]) == pytest.approx(expected, abs=1e-12)
    assert np.square(probabilities - np.eye(5)[labels]).mean() != pytest.approx(expected, abs=1e-2)  # mean over classes


@pytest.mark.parametrize("num_bins", [1, 10, 15])
def test_ece_weighs_the_gaps_of_its_bins(classified: tuple[np.ndarray, np.ndarray], num_bins: int) -> None:
    statistics = classification_statistics(*classified)
    confidence, correct = statistics["confidence"], statistics["correct"]
    expected = ece_by_hand(confidence, correct, num_bins)
    assert expected_calibration_error(confidence, correct, num_bins=num_bins) == pytest.approx(expected, abs=1e-12)
    flipped = expected_calibration_error(confidence, 1 - correct, num_bins=num_bins)
    assert flipped != pytest.approx(expected, abs=1e-2)


def test_ece_weights_the_gap_of_each_bin_by_its_rows() -> None:
    # Bins of 0.5: [0.4 wrong, 0.5 right] and [0.9 right, 1.0 right]: |0.5 - 0.45| / 2 + |1 - 0.95| / 2
    found = expected_calibration_error([0.4, 0.5, 0.9, 1.0], [0, 1, 1, 1], num_bins=2)
    assert found == pytest.approx(0.05, abs=1e-12)
    assert expected_calibration_error([1.0, 1.0], [1, 0]) == pytest.approx(0.5)
    assert expected_calibration_error([0.0], [0]) == 0


def test_reliability_bins_hold_counts_and_means() -> None:
    bins = reliability([0.4, 0.5, 0.9, 1.0, 1.0], [0, 1, 1, 1, 0], num_bins=4)  # (0.25, 0.5] holds two, (0.75, 1] three
    assert bins.num_examples.tolist() == [0, 2, 0, 3]
    np.testing.assert_allclose(bins.confidence, [math.nan, 0.45, math.nan, 2.9 / 3])
    np.testing.assert_allclose(bins.accuracy, [math.nan, 0.5, math.nan, 2 / 3])


def test_auroc_is_the_chance_that_the_outlier_is_more_uncertain() -> None:
    rng = np.random.default_rng(1)
    scores = np.concatenate([rng.normal(0, 1, 60), rng.normal(1, 1, 50)]).round(1)  # with ties
    is_ood = np.repeat([0, 1], [60, 50])
    inside, outside = scores[:60, None], scores[None, 60:]
    expected = ((outside > inside) + 0.5 * (outside == inside)).mean()
    assert ood_auroc(scores, is_ood) == pytest.approx(expected, abs=1e-12)
    assert ood_auroc(scores, is_ood) == pytest.approx(roc_auc_score(is_ood, scores), abs=1e-12)
    assert ood_auroc(-scores, is_ood) == pytest.approx(1 - expected, abs=1e-12)


def test_risk_is_the_mean_loss_of_the_least_uncertain_rows() -> None:
    curve = risk_coverage([0.3, 0.1, 0.2, 0.4], [1, 0, 1, 1])  # least uncertain first: 0, 1, 1, 1
    np.testing.assert_allclose(curve.coverage, [0.25, 0.5, 0.75, 1])
    np.testing.assert_allclose(curve.risk, [0, 1 / 2, 2 / 3, 3 / 4])
    assert curve.aurc == pytest.approx(23 / 48)
    most_uncertain_first = risk_coverage([-0.3, -0.1, -0.2, -0.4], [1, 0, 1, 1])
    assert most_uncertain_first.aurc == pytest.approx(15 / 16)


def test_risk_coverage_does_not_depend_on_the_order_of_ties() -> None:
    rng = np.random.default_rng(2)
    uncertainty, loss = rng.integers(0, 4, 50), rng.integers(0, 2, 50)
    order = rng.permutation(50)
    first, second = risk_coverage(uncertainty, loss), risk_coverage(uncertainty[order], loss[order])
    np.testing.assert_allclose(first.risk, second.risk, atol=1e-12)
    # The average over random orders of the ties, by simulation; 4 standard errors, of about 0.002 each.
    simulated = []
    for _ in range(500):
        shuffled = rng.permutation(50)
        ranked = shuffled[np.argsort(uncertainty[shuffled], kind="stable")]
        simulated.append((np.cumsum(loss[ranked]) / np.arange(1, 51)).mean())
    assert first.aurc == pytest.approx(np.mean(simulated), abs=4 * np.std(simulated) / math.sqrt(500))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: negative_log_likelihood([]), "non-empty"),
        (lambda: negative_log_likelihood([0.1, math.nan]), "first at 1"),
        (lambda: expected_calibration_error([0.5], [1, 0]), "lengths confidence 1, correct 2"),
        (lambda: expected_calibration_error([1.5], [1]), r"\[0, 1\]"),
        (lambda: expected_calibration_error([-0.7], [1]), r"\[0, 1\]"),
        (lambda: expected_calibration_error([0.5], [0.5]), "0 and 1 only"),
        (lambda: expected_calibration_error([0.5], [1], num_bins=0), "num_bins"),
        (lambda: ood_auroc([0.1, 0.2], [1, 1]), "both 0"),
        (lambda: ood_auroc([0.1, math.inf], [0, 1]), "not finite"),
        (lambda: risk_coverage([[0.1]], [1]), "vector"),
        (lambda: classification_statistics([[0.2, 0.2]], [0]), "summing to 1"),
        (lambda: classification_statistics([[2.0, -1.0]], [0]), "not negative"),
        (lambda: classification_statistics([[0.5, 0.5]], [2]), r"\[0, 2\), got 2"),
        (lambda: classification_statistics([[0.5, 0.5]], [-100]), "-100"),
        (lambda: classification_statistics([0.5, 0.5], [0]), r"\[N >= 1, C\]"),
    ],
)
def test_inputs_without_a_meaning_are_refused(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_average_coverage_error_is_the_distance_from_one_sigma() -> None:
    rng = np.random.default_rng(1)
    covered = np.abs(rng.normal(size=(4000, 4))) <= 1
    assert average_coverage_error(covered.mean(1)) < 4 * (0.683 * 0.317 / 16_000) ** 0.5 + 0.0007  # 68.27 %, not 68.2
    assert average_coverage_error(np.ones(5)) == pytest.approx(0.318)
    assert summarise({"covered": np.array([1.0, 0.5])}) == {"ace": pytest.approx(0.75 - 0.682)}
