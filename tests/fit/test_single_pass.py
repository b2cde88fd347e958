"""Calibration factors of a single pass, by labels and by members."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_bayes import (
    BayesianModelForSequenceClassification,
    LaplaceConfig,
    Posterior,
    fit_calibration,
    fit_laplace,
    fit_layer_factors,
    fit_variance_factor,
)
from hf_bayes.members.stacked import refuse_attached
from hf_bayes.posteriors.prediction_fits import with_layer_factors
from tests import runs
from tests.posteriors.test_abstention import RULE
from tests.tiny_models import batch, tiny_bert, with_lora

ROWS = [{"labels" if name == "label" else name: v for name, v in row.items()} for row in runs.label_rows(40, seed=5)]


@pytest.fixture(scope="module")
def wide() -> Posterior:
    """A posterior of LoRA that is too wide for its rows."""
    model = with_lora(tiny_bert(), layers_to_transform=[1])
    return fit_laplace(model, runs.label_rows(10), LaplaceConfig(prior_std=0.3, check_gradient=False))


FITS = pytest.mark.parametrize("fit", [fit_variance_factor, fit_layer_factors])
Fit = Callable[..., Posterior]


def loaded(posterior: Posterior | Path, **options: object) -> BayesianModelForSequenceClassification:
    return BayesianModelForSequenceClassification.from_pretrained(
        posterior, base_model=tiny_bert(), prediction="single_pass", **options
    )


def nll(posterior: Posterior | Path, **options: object) -> float:
    with loaded(posterior, **options) as model:
        inputs = {name: torch.tensor([row[name] for row in ROWS]) for name in ROWS[0]}
        return float(model.evaluate_batch(inputs)[0]["nll"].mean())


def test_a_factor_by_labels_is_stored_and_lowers_the_nll(wide: Posterior, tmp_path: Path) -> None:
    fit_variance_factor(wide, ROWS, base_model=tiny_bert()).save_pretrained(tmp_path)
    factors = Posterior.from_pretrained(tmp_path).config.layer_factors
    assert len(set(factors.values())) == 1
    assert nll(tmp_path) <= nll(wide)
    assert nll(tmp_path, calibrated=False) == nll(tmp_path)  # a factor is no temperature


def test_a_factor_of_a_head_with_independent_outputs_is_found(tmp_path: Path) -> None:
    """A diagonal covariance of the last layer alone: that of the outputs has the shape of their mean."""
    laplace = LaplaceConfig(prior_std=0.3, check_gradient=False)
    head = fit_laplace(tiny_bert(), runs.label_rows(10), laplace, subspace="last_layer")
    fit_variance_factor(head, ROWS, base_model=tiny_bert()).save_pretrained(tmp_path)
    assert nll(tmp_path) <= nll(head)


def test_factors_of_layers_bring_the_uncertainty_of_members(wide: Posterior) -> None:
    found = fit_layer_factors(wide, ROWS, members=64, base_model=tiny_bert())
    factors = found.config.layer_factors
    assert all(".layer.1." in path or "classifier" in path for path in factors)
    assert len(factors) == 3
    with loaded(wide, calibrated=False) as model:
        before = model(**batch()).epistemic
        members = model.predict_by("members")(**batch()).epistemic
    with loaded(found) as model:
        after = model(**batch()).epistemic
    error = [(part / members).log().square().mean() for part in (before, after)]
    assert error[1] < error[0]


def test_factors_of_layers_need_two_members(wide: Posterior) -> None:
    with pytest.raises(ValueError, match="which is 0 for 1 member: give members=2 or more"):
        fit_layer_factors(wide, ROWS, members=1, base_model=tiny_bert())


def test_passes_are_read_once_and_give_the_same_outputs(wide: Posterior, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = batch()
    with loaded(wide, calibrated=False) as model:
        paths = model.predictor.paths
        each = [[path] for path in paths]
        for groups, factors in ((each, {paths[0]: 0.3, paths[1]: 4.0}), ([paths], dict.fromkeys(paths, 3.0))):
            model.predictor.set_factors(factors)
            wanted = model.predictor.outputs(model, inputs)
            with model.predictor.reusing_passes(groups):
                model.predictor.set_factors({})
                model.predictor.outputs(model, inputs)
                monkeypatch.setattr(model.predictor, "_read", None)  # a further pass would raise
                model.predictor.set_factors(factors)
                found = model.predictor.outputs(model, inputs)
            monkeypatch.undo()
            # float32 sums over layers, in another order
            torch.testing.assert_close(found.covariance, wanted.covariance, rtol=1e-4, atol=1e-6)
            assert torch.equal(found.mean, wanted.mean)


def test_a_temperature_is_fitted_to_the_pass_with_its_factors(wide: Posterior) -> None:
    with loaded(wide) as model:
        scaled = with_layer_factors(wide, dict.fromkeys(model.predictor.paths, 25.0))
    fitted = fit_calibration(scaled, 2 * ROWS, base_model=tiny_bert(), prediction="single_pass")
    assert fitted.config.layer_factors == scaled.config.layer_factors
    assert fitted.config.calibration["nll"] == pytest.approx(nll(scaled), rel=1e-5)
    assert abs(nll(scaled) - nll(wide)) > 1e-3  # the twin: a fit without the factors


@FITS
def test_new_factors_leave_out_a_stale_temperature_and_threshold(wide: Posterior, fit: Fit) -> None:
    fitted = fit_calibration(wide, 2 * ROWS, base_model=tiny_bert(), prediction="single_pass")
    changes = {"prediction": "single_pass", "num_members": 0}
    fitted.config.abstention.update(RULE.to_dict() | changes)
    fitted.config.layer_factors["elsewhere"] = 2.0  # of other layers: a new fit begins without it
    found = fit(fitted, ROWS, base_model=tiny_bert()).config
    assert (found.calibration, found.abstention) == ({}, {})
    assert found.layer_factors == fit(wide, ROWS, base_model=tiny_bert()).config.layer_factors


@FITS
def test_bad_rows_leave_the_model_of_the_user_as_it_was(wide: Posterior, fit: Fit) -> None:
    model = tiny_bert()
    short = {name: value[:3] if isinstance(value, list) else value for name, value in ROWS[0].items()}
    with pytest.raises(ValueError, match=r"unequal length .* give a collator that pads"):
        fit(wide, [*ROWS[:3], short], base_model=model)
    refuse_attached(model)
    assert not any("lora" in name for name, _ in model.named_parameters())
    assert all(parameter.requires_grad for parameter in model.parameters())


@FITS
@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "has 0 rows; fit_(variance_factor|layer_factors) needs some"),
        (None, "must have rows that can be counted .* got NoneType"),
        ([{**row, "labels": -100} for row in ROWS[:3]], "no row of (heldout|rows) has a likelihood term"),
        ([{"input_ids": row["input_ids"]} for row in ROWS[:3]], "gives no labels"),
    ],
)
def test_rows_that_judge_nothing_are_refused(wide: Posterior, fit: Fit, rows: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        fit(wide, rows, base_model=tiny_bert())


def test_layers_that_are_not_random_are_refused(wide: Posterior) -> None:
    wide.config.layer_factors["elsewhere"] = 2.0
    try:
        with pytest.raises(ValueError, match="'elsewhere'"):
            loaded(wide)
    finally:
        del wide.config.layer_factors["elsewhere"]
