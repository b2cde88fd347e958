from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import evaluate
import numpy as np
import pytest
import torch

from hf_bayes import metrics
from hf_bayes.metrics import ECE, NLL, OODAUROC, Brier, RiskCoverage, load, per_row_statistics, summarise

NAMES = {"nll": NLL, "ece": ECE, "brier": Brier, "ood_auroc": OODAUROC, "risk_coverage": RiskCoverage}


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise AssertionError(f"a metric reached for the network: {args[1:]}")

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture
def log_probs() -> torch.Tensor:
    return torch.randn(80, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64).log_softmax(-1)


@pytest.fixture
def labels() -> torch.Tensor:
    return torch.randint(6, (80,), generator=torch.Generator().manual_seed(1))


def expected(log_probs: torch.Tensor, labels: torch.Tensor) -> dict[str, float]:
    summary = summarise({name: value.numpy() for name, value in per_row_statistics(log_probs, labels).items()})
    return {name: summary[name] for name in ("nll", "ece", "brier")}


@pytest.mark.parametrize("name", NAMES)
def test_metrics_load_by_name_without_a_hub(name: str, tmp_path: Path) -> None:
    metric = load(name, cache_dir=str(tmp_path))
    assert isinstance(metric, NAMES[name])
    assert isinstance(metric, evaluate.Metric)
    assert isinstance(load(name, keep_in_memory=True, cache_dir=str(tmp_path)), evaluate.Metric)


def test_names_and_configurations_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'accuracy': hf_bayes\.metrics has nll, ece"):
        load("accuracy")
    with pytest.raises(ValueError, match=r"OODAUROC has the configurations scores; got 'tokens'"):
        OODAUROC("tokens")
    with pytest.raises(AttributeError, match="has no attribute 'Accuracy'"):
        _ = metrics.Accuracy


def test_metrics_combine_on_class_probabilities(log_probs: torch.Tensor, labels: torch.Tensor, tmp_path: Path) -> None:
    cache = {"cache_dir": str(tmp_path)}
    combined = evaluate.combine([NLL(**cache), ECE(**cache), Brier(**cache), RiskCoverage("classification", **cache)])
    probabilities = log_probs.exp()
    whole = combined.compute(predictions=probabilities, references=labels)
    curve = metrics.risk_coverage(1 - probabilities.max(1).values, (probabilities.argmax(1) != labels).float())
    risk = {"aurc": curve.aurc, "risk": curve.risk[-1]}
    assert whole == pytest.approx({**expected(log_probs, labels), **risk}, abs=1e-6)  # the expectation is float32
    for row, label in zip(probabilities.tolist(), labels.tolist(), strict=True):
        combined.add(prediction=row, reference=label)
    assert combined.compute() == pytest.approx(whole, abs=1e-12)
    for some in torch.arange(80).split(30):
        combined.add_batch(predictions=probabilities[some].numpy(), references=labels[some].numpy())
    assert combined.compute() == pytest.approx(whole, abs=1e-12)
    with pytest.raises(AssertionError):
        assert combined.compute(predictions=probabilities.flip(1), references=labels) == pytest.approx(whole, abs=1e-6)


def test_metrics_combine_on_statistics_of_tokens(log_probs: torch.Tensor, labels: torch.Tensor, tmp_path: Path) -> None:
    cache = {"cache_dir": str(tmp_path)}
    combined = evaluate.combine([NLL("tokens", **cache), ECE("tokens", **cache), Brier("tokens", **cache)])
    for some in torch.arange(80).split(30):
        combined.add_batch(**per_row_statistics(log_probs[some], labels[some]))
    assert combined.compute() == pytest.approx(expected(log_probs, labels), abs=1e-12)
    statistics = per_row_statistics(log_probs, labels)
    assert combined.compute(**statistics) == pytest.approx(expected(log_probs, labels), abs=1e-12)
    other_bins = combined.compute(**statistics, num_bins=3)
    assert other_bins["nll"] == pytest.approx(expected(log_probs, labels)["nll"])
    assert other_bins["ece"] != pytest.approx(expected(log_probs, labels)["ece"])


def test_a_metric_works_alone(log_probs: torch.Tensor, labels: torch.Tensor, tmp_path: Path) -> None:
    statistics = per_row_statistics(log_probs, labels)
    nll = NLL("tokens", cache_dir=str(tmp_path))
    nll.add_batch(nll=statistics["nll"][:50])
    for value in statistics["nll"][50:].tolist():
        nll.add(nll=value)
    assert nll.compute()["nll"] == pytest.approx(expected(log_probs, labels)["nll"], abs=1e-12)
    ece = ECE("tokens", keep_in_memory=True, cache_dir=str(tmp_path))
    found = ece.compute(confidence=statistics["confidence"], correct=statistics["correct"], num_bins=4)
    assert found["ece"] == pytest.approx(
        metrics.expected_calibration_error(statistics["confidence"], statistics["correct"], num_bins=4)
    )


def test_uncertainties_are_scored(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    uncertainty, is_ood = rng.random(40), np.arange(40) % 2
    both = evaluate.combine([OODAUROC(cache_dir=str(tmp_path)), RiskCoverage(cache_dir=str(tmp_path))])
    found = both.compute(predictions=uncertainty, references=is_ood)
    assert found["ood_auroc"] == pytest.approx(metrics.ood_auroc(uncertainty, is_ood))
    assert found["aurc"] == pytest.approx(metrics.risk_coverage(uncertainty, is_ood).aurc)


def test_misspelt_options_and_logits_are_refused(log_probs: torch.Tensor, labels: torch.Tensor, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown input or option bins"):
        ECE(cache_dir=str(tmp_path)).compute(predictions=log_probs.exp(), references=labels, bins=3)
    with pytest.raises(ValueError, match="class probabilities"):
        NLL(cache_dir=str(tmp_path)).compute(predictions=log_probs, references=labels)
