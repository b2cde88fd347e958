from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_bayes import BayesianModelForSequenceClassification
from hf_bayes.distributions.covariance import dense
from hf_bayes.methods.laplace.curvature import DiagonalCurvature, NotPositiveDefinite
from hf_bayes.methods.laplace.evidence import Expansion
from hf_bayes.methods.laplace.noise_std import fit_noise
from tests.fit.fitted import LAST, NOISE, fit, regression
from tests.runs import token_rows
from tests.tiny_models import tiny_llama, with_lora

pytestmark = pytest.mark.models


def test_learnt_noise_and_prior_maximise_the_evidence(tmp_path: Path) -> None:
    model, data, phi, _ = regression()
    rng = torch.Generator().manual_seed(3)
    y = phi @ torch.tensor([3.0, -2, 1, 0, 2]).double() + 0.3 * torch.randn(12, generator=rng, dtype=torch.float64)
    y = y.float().double()  # as labels arrive
    for row, label in zip(data, y.tolist(), strict=True):
        row["label"] = label
    logs = torch.zeros(2, dtype=torch.float64, requires_grad=True)  # of noise and prior std

    def minus_evidence() -> Tensor:
        noise, std = logs.exp()
        marginal = noise**2 * torch.eye(12) + std**2 * phi @ phi.T
        return -torch.distributions.MultivariateNormal(torch.zeros(12).double(), marginal).log_prob(y)

    optimizer = torch.optim.LBFGS([logs], max_iter=200, tolerance_grad=1e-10, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = minus_evidence()
        value.backward()
        return value

    optimizer.step(closure)
    noise, std = logs.detach().exp().tolist()
    best = torch.linalg.solve(phi.T @ phi / noise**2 + torch.eye(5) / std**2, phi.T @ y / noise**2)
    model.classifier.weight.data, model.classifier.bias.data = best[None, :4].clone(), best[4:].clone()
    posterior = fit(model, data, structure="full", num_samples=None, fit_prior="evidence", fit_noise=True,
                    subspace="last_layer", noise_std=2.0, prior_std=1.0)  # fmt: skip
    (note,) = posterior.config.diagnostics["laplace"]
    found = posterior.config.head["noise_std"]
    assert found == pytest.approx(noise, rel=1e-4)  # the prior's steps end at 1e-6 in its logarithm
    assert note["prior_precision"] == pytest.approx(std**-2, rel=1e-3)
    # steps in log tau end at 1e-6, and count squared where the evidence is largest
    assert note["log_evidence"] == pytest.approx(-float(minus_evidence()), abs=1e-8)
    residuals = float((y - phi @ best).square().mean().sqrt())
    assert abs(residuals / noise - 1) > 0.05  # the twin: as if no parameter had been fitted
    posterior.save_pretrained(tmp_path)
    loaded = BayesianModelForSequenceClassification.from_pretrained(tmp_path, base_model=model).linearise()
    row = {key: torch.tensor([value]) for key, value in data[0].items() if key != "label"}
    spread = float(phi[0] @ dense(posterior.approximation.covariances[0], phi) @ phi[0])
    assert float(loaded(**row).predictive_std) == pytest.approx((found**2 + spread) ** 0.5, rel=1e-5)


@pytest.mark.parametrize("structure", ["diagonal", "kronecker"])
@pytest.mark.parametrize("std", [2.0, 8.0])
@pytest.mark.filterwarnings("ignore:the fitted noise_std")
def test_noise_of_more_parameters_than_rows_is_found(structure: str, std: float) -> None:
    model, data, phi, y = regression(3)
    model.classifier.weight.data.mul_(0.3)  # residuals that are not 0
    changes = {"structure": structure, "num_samples": None, "subspace": "last_layer", "prior_std": std}
    given = fit(model, data, noise_std=NOISE, **changes).approximation
    theta, tau = given.means[0], std**-2
    of_data = torch.linalg.inv(dense(given.covariances[0], phi)) - tau * torch.eye(5).double()
    eigenvalues = NOISE**2 * torch.linalg.eigvalsh(of_data).clamp_min(0)  # of H at noise 1
    square = float((y - phi @ theta).square().sum())

    def num_determined(noise: float) -> float:
        return float((eigenvalues / (eigenvalues + tau * noise**2)).sum())

    logs = torch.linspace(-5, 5, 20_001, dtype=torch.float64)
    scaled = eigenvalues / (2 * logs[:, None]).exp()
    evidence = -square / 2 / (2 * logs).exp() - 3 * logs - 0.5 * (scaled + tau).log().sum(1)
    assert std < 8 or num_determined(math.sqrt(square / 3)) > 3  # a fixed-point iteration cannot start there
    found = fit(model, data, noise_std=NOISE, fit_noise=True, **changes).config.head["noise_std"]
    assert math.log(found) == pytest.approx(float(logs[evidence.argmax()]), abs=5e-4)  # the grid's step
    assert found**2 == pytest.approx(square / (3 - num_determined(found)), rel=1e-6)


def one_expansion(values: list[float], tau: float) -> Callable[[float], list[tuple[Expansion, Tensor]]]:
    """Return the expansion of a diagonal Hessian with ``values`` at noise 1 as a function of the noise."""
    hessian, precision = torch.tensor(values).double(), torch.full((len(values),), tau).double()

    def expand(sigma: float) -> list[tuple[Expansion, Tensor]]:
        curvature = DiagonalCurvature(hessian / sigma**2, hessian=True)
        return [(Expansion(curvature, 0.0, torch.zeros_like(hessian)), precision)]

    return expand


def test_noise_of_a_negative_curvature_is_below_the_residuals() -> None:
    # one parameter of curvature h: a quadratic in sigma^2
    h, tau, count = -0.1, 1.0, 10.0
    b, c = count * h - count * tau - h, -count * h
    expected = math.sqrt((-b + math.sqrt(b**2 - 4 * count * tau * c)) / (2 * count * tau))
    assert expected < 1
    assert fit_noise(one_expansion([h], tau), count, count) == pytest.approx(expected, rel=1e-6)


def test_noise_without_a_maximum_is_refused() -> None:
    with pytest.raises(NotPositiveDefinite, match=r"it falls from noise_std 2\.24 on, .* estimator='ggn'"):
        fit_noise(one_expansion([-5.0], 1.0), 1.0, 1.0)
    with pytest.raises(ValueError, match=r"determine 3 parameters even at .* and there are 3 numbers"):
        fit_noise(one_expansion([1.0] * 3, 0.0), 3.0, 3.0)  # without a prior
    with pytest.raises(ValueError, match="the squared residuals sum to 0: there is no noise to fit"):
        fit_noise(one_expansion([1.0], 1.0), 0.0, 3.0)


def test_noise_that_the_prior_decides_warns() -> None:
    with pytest.warns(UserWarning, match=r"fitted noise_std is 3.24, and the root mean square .* is 1: .* 3 numbers"):
        fit_noise(one_expansion([100.0] * 3, 1.0), 3.0, 3.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"estimator": "ef_sequence"}, "needs estimator='ggn' or 'hessian', got 'ef_sequence'"),
        ({"temperature": 0.5}, "needs temperature=1 and strength=1, got 0.5 and 1"),
        ({"fit_prior": "heldout"}, "fit_noise=True and fit_prior='heldout' do not go together"),
    ],
)
def test_noise_without_an_evidence_is_refused(changes: dict[str, Any], message: str) -> None:
    model, data, *_ = regression()
    with pytest.raises(ValueError, match=message):
        fit(model, data, fit_noise=True, **{**LAST, **changes})


def test_noise_of_a_classifier_is_refused() -> None:
    with pytest.raises(ValueError, match="fit_noise=True is for regressions: this likelihood has no noise_std"):
        fit(with_lora(tiny_llama()), token_rows(2), fit_noise=True)
