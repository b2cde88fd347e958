"""The drift of a Gaussian's epistemic uncertainty under the exact energy of a classifier's last layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_bayes.distributions.approximations import Draws, Gaussian
from hf_bayes.distributions.covariance import Full
from hf_bayes.distributions.energy import GaussianPrior
from hf_bayes.methods.laplace.supported import CurvatureSpec
from hf_bayes.objectives.data_access import DataAccess
from hf_bayes.objectives.drift import DRIFT_SHARE, NUM_PAIRS, NUM_STEPS, measure_drift
from hf_bayes.objectives.informed_spread import SpreadPlan, measure_spread
from hf_bayes.objectives.model_objective import ModelObjective
from hf_bayes.uncertainty.custom.weighted import Weighted
from tests.objectives.classifier import classifier
from tests.objectives.test_all_rows import by_number

STD = 0.3
"""The prior's standard deviation, so narrow that the posterior is nearly Gaussian."""


@pytest.fixture(scope="module")
def objective() -> ModelObjective:
    return classifier(data=DataAccess(by_number, 40))


@pytest.fixture(scope="module")
def exact(objective: ModelObjective) -> Gaussian:
    """The Gaussian of the exact curvature at the MAP estimate, which Newton's method finds."""
    theta = objective.model.theta.detach()[:1].clone()
    for _ in range(10):
        covariance = curved(objective, theta)
        gradient = objective.full_gradient(theta) - theta / STD**2
        theta = theta + covariance.product(gradient)
    return Gaussian(theta, (curved(objective, theta),))


def curved(objective: ModelObjective, theta: Tensor) -> Full:
    spec = CurvatureSpec(structure="full", num_samples=None)
    matrix = objective.curvature(theta[0], spec, gradient=False).curvature.dense()
    return Full(torch.linalg.cholesky(matrix + torch.eye(len(matrix)) / STD**2))


def plan_of(objective: ModelObjective, found: Gaussian | Draws, *, num_gradients: float = 1e6) -> SpreadPlan:
    prior = GaussianPrior(torch.tensor(0.0), torch.tensor(STD))
    return SpreadPlan(found, prior, objective.model.layout.named_shapes, 1.0, True, num_gradients)


def drift(objective: ModelObjective, found: Gaussian | Draws, *, num_gradients: float = 1e6) -> float | None:
    return measure_drift(objective, plan_of(objective, found, num_gradients=num_gradients), seed=0)


def test_draws_of_the_posterior_keep_their_uncertainty(objective: ModelObjective, exact: Gaussian) -> None:
    found = drift(objective, exact)
    assert found is not None
    assert abs(found - 1) < 0.1  # the posterior is not quite Gaussian


def test_a_gaussian_twice_as_wide_drifts_to_about_half(objective: ModelObjective, exact: Gaussian) -> None:
    wide = Gaussian(exact.means, (Full(exact.covariances[0].precision_cholesky / 2**0.5),))
    found = drift(objective, wide)
    assert found is not None
    assert 0.35 < found < 0.65  # about cos^2 + sin^2 / 2 of sqrt(2), 0.51; other seeds give 0.41 to 0.51


def test_a_mean_in_the_wrong_place_is_seen_and_not_by_the_spread(objective: ModelObjective, exact: Gaussian) -> None:
    away = exact.means.clone()
    away[0, -2] += 1.5  # a bias at which the model is surer of a class
    found = Gaussian(away, exact.covariances)
    drifted, spread = drift(objective, found), measure_spread(objective, plan_of(objective, found), seed=0)
    assert drifted is not None
    assert spread is not None
    assert drifted > 1.3  # by the exact trajectories of other seeds 1.4 to 1.6
    assert abs(spread.temperature - 1) < max(0.15, 2 * spread.std_error)  # the twin: the verdict without a drift


def test_draws_and_short_runs_have_no_drift(objective: ModelObjective, exact: Gaussian) -> None:
    enough = 2 * NUM_PAIRS * NUM_STEPS * 40 / DRIFT_SHARE
    assert drift(objective, exact, num_gradients=enough + 1) is not None
    assert drift(objective, exact, num_gradients=enough - 1) is None
    assert drift(objective, Draws(exact.sample(8), torch.arange(8))) is None
    assert drift(classifier(), exact) is None  # no rows by number


def test_rows_of_weight_one_have_the_drift_of_a_classifier(objective: ModelObjective, exact: Gaussian) -> None:
    def weighted(numbers: Sequence[int]) -> Any:
        return ({**batch, "labels": weight_one(batch["labels"])} for batch in by_number(numbers))

    def weight_one(labels: Tensor) -> Tensor:
        return torch.stack([labels.float(), torch.ones(len(labels))], 1)

    of_weights = classifier(Weighted(), data=DataAccess(weighted, 40))
    assert drift(of_weights, exact) == pytest.approx(drift(objective, exact), rel=1e-5)
