"""Tests of ``fit_training_free``: a finished adapter becomes a posterior whose width held-out rows determine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from hf_bayes import (
    BayesianModelForSequenceClassification,
    MeanFieldConfig,
    Posterior,
    TrainingFreeConfig,
    attach,
    fit_laplace,
    fit_training_free,
)
from tests.faults import posteriors
from tests.runs import label_rows, token_rows
from tests.tiny_models import batch, tiny_bert, tiny_llama, with_lora

ROWS = 120


def adapter(model: Any = None) -> Any:
    """Return a tiny model with a LoRA that is not at its start."""
    return with_lora(tiny_bert() if model is None else model)


def labelled(model: Any, count: int = ROWS) -> list[dict[str, Any]]:
    """Return rows whose labels the model itself drew, so that noise makes its predictions worse."""
    rows, generator = label_rows(count), torch.Generator().manual_seed(0)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([row["input_ids"] for row in rows])).logits
    drawn = (3 * logits).softmax(-1).multinomial(1, generator=generator)[:, 0].tolist()
    return [{**row, "label": label} for row, label in zip(rows, drawn, strict=True)]


def inputs_of(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    return {
        "input_ids": torch.tensor([r["input_ids"] for r in rows]),
        "labels": torch.tensor([r["label"] for r in rows]),
    }


def test_a_loaded_posterior_has_the_losses_of_the_verdict(tmp_path: Path) -> None:
    model = adapter()
    rows, before = labelled(model), {name: value.clone() for name, value in model.state_dict().items()}
    posterior = fit_training_free(model, rows, seed=5)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    (report,) = posterior.config.diagnostics["training_free"]
    assert report["passes"]
    assert report["scale"] < report["too_wide"] < 4.01 * report["scale"]
    posterior.save_pretrained(tmp_path)
    assert posteriors.equal(Posterior.from_pretrained(tmp_path), posterior)
    loaded = BayesianModelForSequenceClassification.from_pretrained(tmp_path, base_model=tiny_bert())
    assert loaded.num_members == 10
    even, odd = (float(loaded.evaluate_batch(inputs_of(rows[first::2]))[0]["nll"].mean()) for first in (0, 1))
    assert even == pytest.approx(report["loss"] + report["difference"], abs=1e-5)  # float32, at the very same members
    assert odd == pytest.approx(posterior.config.metrics["nll"], abs=1e-5)
    assert loaded(**inputs_of(rows)).epistemic.min() > 0


def test_the_mean_of_the_posterior_is_the_adapter() -> None:
    model = adapter()
    rows = labelled(model)
    expected = model(input_ids=inputs_of(rows)["input_ids"]).logits.log_softmax(-1)
    posterior = fit_training_free(model, rows)
    with attach(model, posterior.approximation.means) as mean:
        found = mean(input_ids=inputs_of(rows)["input_ids"]).logits
    assert (found - expected).abs().max() < 1e-4  # float32, factors rotated


@pytest.mark.parametrize("scales", ["one", "layer"])
def test_at_most_eleven_passes_over_the_heldout_rows(scales: str) -> None:
    model = adapter()
    rows, seen = labelled(model), []
    with attach(model) as bayesian:
        calls, start = [], bayesian.evaluate_batch
        bayesian.evaluate_batch = lambda inputs, **how: calls.append(len(inputs["labels"])) or start(inputs, **how)  # type: ignore[method-assign]
        fit_training_free(bayesian, rows, TrainingFreeConfig(scales=scales), batch_size=ROWS)
        seen = calls
    # eight passes for the scale, two for the comparison, and one without labels' statistics for the temperature
    assert len(seen) + 1 <= 11
    assert sum(seen) + ROWS // 2 <= 11 * ROWS


def test_the_comparison_is_on_rows_of_neither_fit() -> None:
    model = adapter()
    rows = labelled(model)
    first = fit_training_free(model, rows)
    other = [row if i % 2 == 0 else {**row, "label": (row["label"] + 1) % 3} for i, row in enumerate(rows)]
    second = fit_training_free(model, other)
    assert torch.equal(first.approximation.stds, second.approximation.stds)  # odd rows do not determine the width
    assert second.config.metrics["nll"] > first.config.metrics["nll"] + 0.1
    assert second.config.metrics["map_nll"] > first.config.metrics["map_nll"] + 0.1
    assert "other held-out rows" in first.config.diagnostics["verdict"]
    assert "temperature scaling (t = " in first.config.diagnostics["verdict"]


def test_the_posterior_predicts_linearised_and_in_one_pass() -> None:
    model = adapter()
    posterior, rows = fit_training_free(model, labelled(model)), labelled(model, 4)
    for prediction in ("linearised", "single_pass"):
        loaded = BayesianModelForSequenceClassification.from_pretrained(
            posterior, base_model=tiny_bert(), prediction=prediction
        )
        assert loaded(**inputs_of(rows)).logits.isfinite().all()
        loaded.detach()


def test_points_are_refused_as_a_prior() -> None:
    model = adapter()
    posterior, rows = fit_training_free(model, labelled(model)), labelled(model, 8)
    with pytest.raises(ValueError, match=r"prior \(training_free\): .* elements of this Gaussian are points"):
        fit_laplace(model, rows, prior=posterior)


def test_language_models_and_folders_are_taken(tmp_path: Path) -> None:
    base = tiny_llama()
    base.save_pretrained(tmp_path / "base")
    model = adapter(type(base).from_pretrained(tmp_path / "base"))
    model.save_pretrained(tmp_path / "adapter")
    posterior = fit_training_free(model, token_rows(40))
    again = fit_training_free(tmp_path / "adapter", token_rows(40))
    # a plain adapter's tensors are in another order, so the draws of the noise differ
    losses = [one.config.diagnostics["training_free"][0]["loss"] for one in (posterior, again)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    assert again.config.task == "causal_lm"
    assert attach(model, again.sample(2))(**batch()).logits.isfinite().all()


def test_without_heldout_rows_it_is_refused_in_words() -> None:
    model = adapter()
    with pytest.raises(ValueError, match="needs held-out rows, got None: the posterior is as wide as they allow"):
        fit_training_free(model, None)
    with pytest.raises(ValueError, match="heldout is a DataLoader, and fit_training_free makes batches"):
        fit_training_free(model, DataLoader(label_rows(4)))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="heldout needs at least 40 rows, got 39"):
        fit_training_free(model, label_rows(39))
    with pytest.raises(ValueError, match="method must be of the class TrainingFreeConfig, got MeanFieldConfig"):
        fit_training_free(model, label_rows(40), MeanFieldConfig())
    with pytest.raises(ValueError, match="no pair of LoRA factors"):
        fit_training_free(tiny_bert(), label_rows(40), subspace="last_layer")
    with pytest.raises(ValueError, match="every B of the LoRA is zero"):
        fit_training_free(with_lora(tiny_bert(), init_b=0), label_rows(40))
