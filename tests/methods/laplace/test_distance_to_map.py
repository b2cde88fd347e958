from __future__ import annotations

import json
import warnings
from typing import Any

import pytest
import torch

from hf_bayes.distributions.covariance import Diagonal
from hf_bayes.methods.laplace.distance_to_map import how_far
from hf_bayes.methods.laplace.gradient_estimate import GradientEstimate
from tests.fit.fitted import LAST, fit, regression
from tests.runs import label_rows
from tests.tiny_models import tiny_bert

pytestmark = pytest.mark.models


def test_a_negative_square_is_stored_as_below_noise_not_as_zero() -> None:
    torch.manual_seed(0)
    first, pull = torch.randn(4), torch.zeros(4)
    opposed = torch.stack([first, -first])  # halves that say the opposite: no gradient that they agree on
    report = how_far(GradientEstimate(opposed, 2, 40), pull, Diagonal(torch.ones(4)), 1.0)
    assert report == {
        "gradient_norm": None, "displacement": None, "gradient_rows": 2,
        "below_noise": ["gradient_norm", "displacement"],
    }  # fmt: skip
    assert json.loads(json.dumps(report)) == report
    found = how_far(GradientEstimate(torch.stack([first, first]), 2, 40), pull, Diagonal(torch.full((4,), 0.1)), 1.0)
    assert found["gradient_norm"] == pytest.approx(float(first.norm()), rel=1e-6)
    assert found["displacement"] == pytest.approx(float(0.1 * first.norm()) / 2, rel=1e-6)
    assert "below_noise" not in found
    exact = how_far(GradientEstimate(torch.zeros(2, 4), 40, 40), pull, Diagonal(torch.ones(4)), 1.0)
    assert (exact["gradient_norm"], exact["displacement"]) == (0, 0)  # of all rows zero is zero


def test_a_displacement_is_warned_of_where_the_norm_is_lost() -> None:
    halves = torch.tensor([[10.0, 100.0], [10.0, -100.0]])  # they agree on the first element, whose std is the larger
    with pytest.warns(
        UserWarning, match="has a norm that 2 rows cannot distinguish from 0, and the Gaussian's maximum is"
    ):
        report = how_far(GradientEstimate(halves, 2, 40), torch.zeros(2), Diagonal(torch.tensor([1.0, 1e-3])), 1.0)
    assert report["below_noise"] == ["gradient_norm"]


def test_weights_that_are_no_map_are_told_so() -> None:
    model, data, *_ = regression()
    model.classifier.weight.data += 3.0
    with pytest.warns(
        UserWarning, match=r"the weights are no MAP: the gradient .* has norm .* standard deviations away"
    ):
        posterior = fit(model, data, structure="full", num_samples=None, **LAST)
    assert posterior.config.diagnostics["laplace"][0]["displacement"] > 1


@pytest.mark.parametrize("changes", [
    {"prior_std": 100.0}, {"prior_std": 100.0, "temper": "likelihood", "temperature": 0.5},
    {"prior_std": 100.0, "fit_prior": "evidence"},
], ids=["covariance", "tempered", "evidence"])  # fmt: skip
def test_refusals_without_a_minimum_name_the_gradient_norm(changes: dict[str, Any]) -> None:
    model = tiny_bert(dtype=torch.float64, num_labels=3, hidden_size=4, intermediate_size=6)
    where = {"subspace": "last_block"}
    with pytest.raises(ValueError, match=r"not positive definite.*train on.*jitter") as told:
        fit(model, label_rows(4), estimator="hessian", structure="full", **where, **changes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        others = {key: value for key, value in changes.items() if key != "fit_prior"}
        (note,) = fit(model, label_rows(4), **where, **others).config.diagnostics["laplace"]
    assert note["gradient_norm"] > 0.1
    assert f"has norm {note['gradient_norm']:.3g} here and 0 at a MAP: else train longer" in str(told.value)


def test_a_refusal_without_a_gradient_says_that_nobody_looked() -> None:
    model = tiny_bert(num_labels=3, hidden_size=4, intermediate_size=6)
    with pytest.raises(ValueError, match=r"not positive definite.*gradient was not computed: check_gradient=True"):
        fit(model, label_rows(4), structure="full", subspace="last_block", prior_std=1e6, check_gradient=False)
