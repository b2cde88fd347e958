from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from hf_bayes.metrics import classification_statistics, per_row_statistics, summarise


def predictions(rows: int = 60, classes: int = 9) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(0)
    log_probs = (3 * torch.randn(rows, classes, generator=rng)).log_softmax(-1)
    return log_probs, torch.randint(classes, (rows,), generator=rng)


def test_statistics_of_rows_equal_float64_numpy() -> None:
    log_probs, labels = predictions()
    found = per_row_statistics(log_probs, labels)
    expected = classification_statistics(log_probs.double().softmax(-1).numpy(), labels.numpy())
    assert set(found) == set(expected) == {"nll", "confidence", "correct", "brier"}
    for name, value in found.items():
        assert value.dtype == torch.float32
        np.testing.assert_allclose(value.numpy(), expected[name], atol=2e-6)  # float32 of numbers up to 20
    nearly = per_row_statistics(log_probs + 0.01, labels)
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(nearly["nll"].numpy(), expected["nll"], atol=2e-6)


@pytest.mark.parametrize("wrong", [0.1, -0.1, math.nan])
def test_logits_that_nobody_normalised_are_refused(wrong: float) -> None:
    log_probs, labels = predictions()
    log_probs[7] += wrong
    with pytest.raises(ValueError, match=r"sum to (1 to 1.11|0.905 to 1|nan to nan): apply log_softmax to logits"):
        per_row_statistics(log_probs, labels)


@pytest.mark.parametrize("classes", [9, 108_283])
def test_log_probabilities_in_half_precision_are_no_logits(classes: int) -> None:
    log_probs = torch.full(
        (2, classes), -math.log(classes)
    ).bfloat16()  # all classes have the largest possible rounding error
    found = per_row_statistics(log_probs, torch.tensor([0, 3]))
    assert found["nll"].tolist() == pytest.approx([math.log(classes)] * 2, abs=0.035)


def test_classes_of_probability_zero_count_for_nothing() -> None:
    log_probs = torch.tensor([[math.log(0.25), math.log(0.75), -math.inf]])
    found = per_row_statistics(log_probs, torch.tensor([0]))
    assert found["nll"].item() == pytest.approx(math.log(4))
    assert found["brier"].item() == pytest.approx(2 * 0.75**2)
    impossible = per_row_statistics(log_probs, torch.tensor([2]))
    assert impossible["nll"].item() == math.inf
    assert impossible["brier"].item() == pytest.approx(0.25**2 + 0.75**2 + 1)


def test_statistics_leave_predictions_alone_and_take_no_rows() -> None:
    log_probs, labels = predictions()
    before = log_probs.clone()
    per_row_statistics(log_probs, labels)
    assert torch.equal(before, log_probs)
    assert all(value.shape == (0,) for value in per_row_statistics(log_probs[:0], labels[:0]).values())


@pytest.mark.parametrize(
    ("label", "message"), [(-100, "ignored labels"), (9, r"lie in \[0, 9\), got 0 to 9")], ids=["ignored", "too large"]
)
def test_labels_that_are_no_class_are_refused(label: int, message: str) -> None:
    log_probs, labels = predictions()
    labels[0], labels[5] = 0, label
    with pytest.raises(ValueError, match=message):
        per_row_statistics(log_probs, labels)
    with pytest.raises(ValueError, match=r"log_probs \[N, C\]"):
        per_row_statistics(log_probs, labels[1:])


def test_a_summary_weighs_every_row_alike() -> None:
    log_probs, labels = predictions()
    rows = {name: value.numpy() for name, value in per_row_statistics(log_probs, labels).items()}
    rows |= {"total": np.linspace(1, 2, 60), "aleatoric": np.linspace(0, 1, 60), "epistemic": np.ones(60)}
    summary = summarise(rows)
    assert summary["nll"] == pytest.approx(rows["nll"].mean(dtype=np.float64), abs=1e-12)
    assert summary["accuracy"] == pytest.approx((log_probs.argmax(-1) == labels).double().mean().item())
    assert summary["brier"] == pytest.approx(rows["brier"].mean(dtype=np.float64), abs=1e-12)
    assert summary["ece"] > 0
    assert (summary["total"], summary["aleatoric"], summary["epistemic"]) == pytest.approx((1.5, 0.5, 1.0))
    assert all(isinstance(value, float) for value in summary.values())
    # A mean of the means of batches of 50 and 10 is another number.
    of_batches = (rows["nll"][:50].mean() + rows["nll"][50:].mean()) / 2
    assert of_batches != pytest.approx(summary["nll"], abs=1e-3)


def test_a_density_has_an_nll_alone() -> None:
    assert summarise({"nll": np.array([0.5, 1.5])}) == {"nll": 1.0}


@pytest.mark.parametrize(
    ("statistics", "message"),
    [
        ({}, "got none"),
        ({"nll": []}, "non-empty"),
        ({"nll": [1.0], "brier": [1.0, 2.0]}, r"nll \[1\], brier \[2\]"),
        ({"nll": [1.0, math.nan]}, "nll are not finite"),
        ({"nll": [1.0], "epistemic": [math.nan]}, "epistemic are not finite"),
        ({"correct": [math.nan, 1.0]}, "correct are not finite"),
        ({"nll": [1.0], "confidence": [0.5]}, "confidence needs correct beside it, for the ece; got nll, confidence"),
    ],
)
def test_summaries_of_nothing_or_of_padding_are_refused(statistics: dict[str, list[float]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        summarise(statistics)
